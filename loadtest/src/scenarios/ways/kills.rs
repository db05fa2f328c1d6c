//! Kills that are drawn from the seed before anything runs, and come as the execution progresses; and the end of one that is stuck.

use super::jobs::{WORKERS, Way};
use crate::cluster::Role;
use crate::oracle::{self, rows_of};
use crate::session::{Session, now_ms};
use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use shardcron_domain::ExecutionId;
use shardcron_store::{ExecutionRow, Ledger, SqlArg};
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(25);
/// An execution of which no record was added for this long, and no worker killed, is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);
/// The longest time from the records that are looked for to the kill: below the time of the part that each kill has.
const AFTER_MS_MAX: u64 = 800;
/// Seeds of ways are apart by their place in the list, those of runs by so much.
const WAYS_MAX: u64 = 1_000;

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Victim {
    /// The worker in this place. A replacement takes the place of the dead.
    Place(usize),
    /// Whoever has the map's first shard in hand.
    Mapper,
}

/// A kill as it is drawn from the seed: no clock, and nothing of what the run does, has a part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Kill {
    /// It comes when the ledger counts so many records of the execution,
    pub at_records: u64,
    /// so many milliseconds after that was seen. Records are counted at the end of a step: without this, kills would all come at the
    /// beginning of one.
    pub after_ms: u64,
    /// Who.
    pub victim: Victim,
}

/// A kill as it came.
#[derive(Clone, Debug, Serialize)]
pub struct Killed {
    #[serde(flatten)]
    plan: Kill,
    /// The records that were counted when it came.
    records: u64,
    /// The worker's name.
    worker: String,
    /// Shards of the execution that the ledger still has in the dead worker's hands.
    pub held: u64,
}

/// How an execution went.
pub struct Course {
    /// The execution at its end.
    pub row: ExecutionRow,
    /// The kills that came.
    pub kills: Vec<Killed>,
    /// Why it was cancelled, and what stood open then. Empty if it ended by itself.
    pub stuck: Vec<String>,
}

/// The kills of a way, one in each of as many equal parts of the work. Each way has its own stream, whichever others run. Of a map the
/// first is while it emits, if there is another one for its tasks.
pub fn plan(way: Way, kills: u32, seed: u64) -> Vec<Kill> {
    let mut random = StdRng::seed_from_u64(seed.wrapping_mul(WAYS_MAX).wrapping_add(way as u64));
    let part = way.killed_until(kills) / f64::from(kills.max(1));
    let step_ms = way.step_ms(kills).clamp(1, AFTER_MS_MAX);
    let mut kills: Vec<Kill> = (0..kills)
        .map(|n| Kill {
            at_records: ((f64::from(n) + random.random_range(0.0..1.0)) * part * way.records() as f64) as u64,
            after_ms: random.random_range(0..step_ms),
            victim: Victim::Place(random.random_range(0..WORKERS as usize)),
        })
        .collect();
    if let (Way::Map, [first, _, ..]) = (way, kills.as_mut_slice()) {
        (first.at_records, first.victim) = (0, Victim::Mapper);
    }
    kills
}

/// Watches an execution to its end and kills meanwhile by the plan. One that is stuck, or has not ended within `bound`, is cancelled.
///
/// # Errors
/// A process ends by itself, or the ledger does not answer.
pub async fn run(
    session: &mut Session,
    way: Way,
    execution: ExecutionId,
    plan: &[Kill],
    bound: Duration,
) -> Result<Course> {
    let mut places = session.cluster.names(Role::Worker);
    let (began, mut moved, mut at) = (Instant::now(), Instant::now(), 0);
    let mut kills: Vec<Killed> = Vec::new();
    loop {
        session.cluster.check()?;
        let row = session.ledger.execution(execution).await?.context("the execution is not in the ledger")?;
        if row.phase.is_terminal() {
            return Ok(Course { row, kills, stuck: Vec::new() });
        }
        let now = session.ledger.rows_done(execution).await?;
        if now > at {
            (at, moved) = (now, Instant::now());
        }
        let progress = format!("{at} of {} records, {} of {} kills", way.records(), kills.len(), plan.len());
        let why = if began.elapsed() > bound {
            Some(format!("not ended within {} s: {progress}", bound.as_secs()))
        } else if moved.elapsed() > STUCK_AFTER {
            Some(format!("nothing has moved for {} s: {progress}", STUCK_AFTER.as_secs()))
        } else {
            None
        };
        if let Some(why) = why {
            let stuck = give_up(session, execution, &why).await?;
            let row = session.ledger.execution(execution).await?.context("the execution is not in the ledger")?;
            return Ok(Course { row, kills, stuck });
        }
        if let Some(next) = plan.get(kills.len()).filter(|next| now >= next.at_records) {
            tokio::time::sleep(Duration::from_millis(next.after_ms)).await;
            if let Some(killed) = kill(session, execution, *next, now, &mut places).await? {
                kills.push(killed);
                moved = Instant::now();
                session.voice.phase(&format!("{}: {} of {} workers killed", way.name(), kills.len(), plan.len()));
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Cancels an execution for a reason that the ledger keeps, too. Gives the reason, and before that is done, what stands open.
///
/// # Errors
/// The ledger does not answer.
pub async fn give_up(session: &Session, execution: ExecutionId, why: &str) -> Result<Vec<String>> {
    let mut words = vec![why.to_owned()];
    words.extend(oracle::open_ends(&session.ledger).await?);
    let phase = session.ledger.cancel(execution, "loadtest", why, now_ms()).await?;
    words.push(format!("cancelled: it is {} now", phase.map_or("unknown", |phase| phase.word())));
    Ok(words)
}

/// An id as the database's `HEX` writes it.
pub fn hex(execution: ExecutionId) -> String {
    execution.as_bytes().iter().map(|byte| format!("{byte:02X}")).collect()
}

/// None: nobody has the map's first shard in hand at this moment. The replacement starts at once: the dead one's shards are taken over
/// from it, not by its coming back.
async fn kill(
    session: &mut Session,
    execution: ExecutionId,
    plan: Kill,
    records: u64,
    places: &mut [String],
) -> Result<Option<Killed>> {
    let place = match plan.victim {
        Victim::Place(place) => place,
        Victim::Mapper => {
            let owners = owners(session, execution, " AND shard_index = 0").await?;
            match places.iter().position(|name| held(session, name, &owners) > 0) {
                Some(place) => place,
                None => return Ok(None),
            }
        }
    };
    let place = places.get_mut(place).context("a worker is missing")?;
    let worker = place.clone();
    session.cluster.kill(&worker)?;
    // Only now, when the dead one can't end any more of them.
    let held = held(session, &worker, &owners(session, execution, "").await?);
    *place = session.cluster.start(Role::Worker)?;
    Ok(Some(Killed { plan, records, worker, held }))
}

/// Who has shards of an execution in hand, by incarnation, and how many.
async fn owners(session: &Session, execution: ExecutionId, which: &str) -> Result<Vec<(String, u64)>> {
    let sql = format!(
        "SELECT HEX(owner), COUNT(*) FROM shards WHERE state = 1 AND HEX(execution_id) = ?{which} GROUP BY owner"
    );
    let rows = rows_of(&session.ledger, &sql, &[SqlArg::Text(hex(execution))]).await?;
    let number = |text: &String| text.parse().with_context(|| format!("a number that reads '{text}'"));
    rows.iter().map(|row| Ok((row[0].clone(), number(&row[1])?))).collect()
}

fn held(session: &Session, worker: &str, owners: &[(String, u64)]) -> u64 {
    let incarnations = session.cluster.incarnations(worker);
    owners.iter().filter(|(owner, _)| incarnations.contains(owner)).map(|(_, shards)| shards).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn a_seed_gives_each_way_the_same_kills_whichever_others_run() {
        for way in Way::value_variants() {
            assert_eq!(plan(*way, 10, 7), plan(*way, 10, 7));
            assert_ne!(plan(*way, 10, 7), plan(*way, 10, 8), "{way:?}");
        }
        assert_ne!(plan(Way::Exec, 10, 7)[0].after_ms, plan(Way::Http, 10, 7)[0].after_ms, "streams of their own");
    }

    #[test]
    fn kills_are_spread_over_the_work_and_the_workers() {
        for (way, kills) in Way::value_variants().iter().flat_map(|way| [(*way, 1), (*way, 10), (*way, 50)]) {
            let plan = plan(way, kills, 3);
            assert_eq!(plan.len(), kills as usize);
            let part = way.records() as f64 * way.killed_until(kills) / f64::from(kills);
            for (n, kill) in plan.iter().enumerate() {
                if kill.victim == Victim::Mapper {
                    assert_eq!((way, n, kill.at_records), (Way::Map, 0, 0));
                    continue;
                }
                let at = kill.at_records as f64;
                assert!(at >= (n as f64 * part).floor() && at <= (n as f64 + 1.0) * part, "{way:?} {n}: {kill:?}");
                assert!(matches!(kill.victim, Victim::Place(0..=2)) && kill.after_ms < way.step_ms(kills), "{kill:?}");
            }
            let places = |place| plan.iter().filter(|kill| kill.victim == Victim::Place(place)).count();
            assert!(kills < 50 || (0..3).all(|place| places(place) > 5), "{way:?}: {plan:?}");
        }
    }
}
