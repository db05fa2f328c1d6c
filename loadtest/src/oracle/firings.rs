//! The oracle for firings: F1 and F2, counted by arithmetic of its own on the instants that had to fire.

use super::rows_of;
use anyhow::Result;
use shardcron_store::SqlArg;
use shardcron_store::sql::SqlLedger;
use std::collections::BTreeMap;

/// What had to fire.
#[derive(Clone, Debug, Default)]
pub struct Due {
    /// Jobs whose instants are all multiples of a period, in milliseconds.
    pub periodic: Vec<(&'static str, i64)>,
    /// Instants up to this one are not looked at.
    pub after_ms: i64,
    /// The last instant that is looked at.
    pub until_ms: i64,
    /// Requests that were asked for until they were taken, by job and id.
    pub requests: Vec<(&'static str, String)>,
}

/// What became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firings {
    /// Instants and requests that had to fire.
    pub due: u64,
    /// Those without exactly one decision to fire, each in words (F2).
    pub missed: Vec<String>,
    /// Those that made more than one execution, or that nobody had to fire, each in words (F1).
    pub doubled: Vec<String>,
}

/// Decisions and executions of a job by nominal instant, or by fire key; those of its schedule, or its requests.
const BY_INSTANT: &str = "\
SELECT k.at, SUM(k.decided), SUM(k.fired), SUM(k.executed) FROM (\
 SELECT d.nominal_ms AS at, 1 AS decided, CASE WHEN d.execution_id IS NULL THEN 0 ELSE 1 END AS fired, 0 AS executed \
 FROM decisions d JOIN jobs j ON j.id = d.job_id WHERE j.name = ? AND d.fire_key NOT LIKE 'request:%' \
 UNION ALL \
 SELECT e.nominal_ms, 0, 0, 1 \
 FROM executions e JOIN jobs j ON j.id = e.job_id WHERE j.name = ? AND e.fire_key NOT LIKE 'request:%') k GROUP BY k.at";
const BY_REQUEST: &str = "\
SELECT k.at, SUM(k.decided), SUM(k.fired), SUM(k.executed) FROM (\
 SELECT CAST(d.fire_key AS CHAR) AS at, 1 AS decided, CASE WHEN d.execution_id IS NULL THEN 0 ELSE 1 END AS fired, 0 AS executed \
 FROM decisions d WHERE d.fire_key LIKE 'request:%' \
 UNION ALL \
 SELECT CAST(e.fire_key AS CHAR), 0, 0, 1 FROM executions e WHERE e.fire_key LIKE 'request:%') k GROUP BY k.at";

#[derive(Clone, Copy, Default)]
struct Seen {
    decided: i64,
    fired: i64,
    executed: i64,
}

/// Compares what had to fire with what the ledger holds.
///
/// # Errors
/// The ledger does not answer.
pub async fn firings(ledger: &SqlLedger, due: &Due) -> Result<Firings> {
    let mut found = Firings::default();
    for (job, period) in &due.periodic {
        let seen = seen(ledger, BY_INSTANT, &[SqlArg::Text((*job).into()), SqlArg::Text((*job).into())]).await?;
        let seen: BTreeMap<i64, Seen> = seen.into_iter().filter_map(|(at, s)| Some((at.parse().ok()?, s))).collect();
        let first = due.after_ms.div_euclid(*period) + 1;
        for instant in (first..=due.until_ms.div_euclid(*period)).map(|n| n * period) {
            judge(&mut found, &format!("{job} at {instant}"), seen.get(&instant).copied().unwrap_or_default());
        }
        for instant in seen.keys().filter(|instant| *instant % period != 0) {
            found.doubled.push(format!("{job} at {instant}, which is no instant of its schedule"));
        }
    }
    let mut asked = seen(ledger, BY_REQUEST, &[]).await?;
    for (job, id) in &due.requests {
        let seen = asked.remove(&format!("request:{id}")).unwrap_or_default();
        judge(&mut found, &format!("{job}, request {id}"), seen);
    }
    found.doubled.extend(asked.keys().map(|key| format!("{key}, which nobody sent")));
    Ok(found)
}

fn judge(found: &mut Firings, what: &str, Seen { decided, fired, executed }: Seen) {
    found.due += 1;
    match (decided, fired) {
        (1, 1) => {}
        (0, _) => found.missed.push(format!("{what}: no decision")),
        (1, _) => found.missed.push(format!("{what}: decided not to fire")),
        (n, _) => found.doubled.push(format!("{what}: {n} decisions")),
    }
    if executed > 1 {
        found.doubled.push(format!("{what}: {executed} executions"));
    }
}

async fn seen(ledger: &SqlLedger, sql: &str, args: &[SqlArg]) -> Result<BTreeMap<String, Seen>> {
    let rows = rows_of(ledger, sql, args).await?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let number = |at: usize| row.get(at).and_then(|text| text.parse().ok()).unwrap_or(0);
            let seen = Seen { decided: number(1), fired: number(2), executed: number(3) };
            (row.into_iter().next().unwrap_or_default(), seen)
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_store::Ledger;
    use shardcron_store::sql::SqlOptions;

    /// One job `tick` with instants 1 to 5 s, fired; and two requests.
    async fn after(fault: &str) -> Firings {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        ledger.migrate().await.unwrap();
        let jobs = shardcron_domain::jobfile::parse("[job.tick]\nhandler = { rust = \"noop\" }\n").unwrap();
        ledger.apply_jobs(&[(jobs[0].clone(), None)], "test", 0).await.unwrap();
        let mut script = String::new();
        for n in 1..=5 {
            script += &write(n, &n.to_string());
        }
        script += &write(7, "request:a");
        script += &write(8, "request:b");
        ledger.execute_script(&format!("{script}{fault}")).await.unwrap();
        let requests = ["a", "b"].map(|id| ("tick", id.to_owned())).to_vec();
        firings(&ledger, &Due { periodic: vec![("tick", 1_000)], after_ms: 1_500, until_ms: 5_000, requests })
            .await
            .unwrap()
    }

    fn write(n: i64, key: &str) -> String {
        let ms = n * 1_000;
        format!(
            "INSERT INTO executions (id, job_id, version, fire_key, state, tier, nominal_ms, fired_ms, epoch, plan, params, \
             shards_total, materialized) VALUES (X'{n:032x}', 1, 1, '{key}', 1, 'core', {ms}, {ms}, 1, '', '', 1, 1);\
             INSERT INTO decisions (job_id, fire_key, nominal_ms, kind, decided_ms, epoch, execution_id) \
             VALUES (1, '{key}', {ms}, 0, {ms}, 1, X'{n:032x}');"
        )
    }

    #[tokio::test]
    async fn what_fired_once_is_good() {
        let good = after("").await;
        assert_eq!(good, Firings { due: 6, ..Firings::default() });
    }

    #[tokio::test]
    async fn an_instant_without_a_decision_or_without_a_firing_is_missed() {
        let gone = after("DELETE FROM decisions WHERE nominal_ms = 3000").await;
        assert_eq!(gone.missed, ["tick at 3000: no decision"]);
        let unfired = after("UPDATE decisions SET execution_id = NULL WHERE nominal_ms = 4000").await;
        assert_eq!(unfired.missed, ["tick at 4000: decided not to fire"]);
        let before = after("DELETE FROM decisions WHERE nominal_ms = 1000").await;
        assert_eq!(before.missed.len(), 0, "before what is looked at");
        let request = after("DELETE FROM decisions WHERE fire_key = 'request:b'").await;
        assert_eq!(request.missed, ["tick, request b: no decision"]);
    }

    #[tokio::test]
    async fn a_second_firing_is_doubled() {
        let again = after(&write(9, "9").replace("9000", "3000")).await;
        assert_eq!(again.doubled, ["tick at 3000: 2 decisions", "tick at 3000: 2 executions"]);
        let stray = after(&write(9, "9").replace("9000", "3500")).await;
        assert_eq!(stray.doubled, ["tick at 3500, which is no instant of its schedule"]);
        let unasked = after(&write(9, "request:c")).await;
        assert_eq!(unasked.doubled, ["request:c, which nobody sent"]);
    }
}
