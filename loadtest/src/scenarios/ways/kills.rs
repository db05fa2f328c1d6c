//! Kills at random moments, spread over an execution; the victim is a worker that has some of its shards in hand.

use super::jobs::Way;
use crate::cluster::Role;
use crate::oracle::rows_of;
use crate::session::Session;
use anyhow::{Context, Result, bail};
use rand::RngExt;
use rand::rngs::StdRng;
use shardcron_domain::ExecutionId;
use shardcron_store::{ExecutionRow, Ledger, SqlArg};
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(25);
const STUCK_AFTER: Duration = Duration::from_secs(60);
/// Beyond the moment that is looked for, so that kills do not all come right after a commit.
const JITTER_MS: u64 = 250;

/// Watches an execution to its end, or until it is stuck, and kills meanwhile; gives how often.
///
/// # Errors
/// A process ends by itself, or the ledger does not answer.
pub async fn run(
    session: &mut Session,
    way: Way,
    execution: ExecutionId,
    kills: u32,
    random: &mut StdRng,
) -> Result<(ExecutionRow, u32)> {
    let moments = moments(way, kills, random);
    let (mut killed, mut at, mut moved) = (0, 0.0, Instant::now());
    loop {
        session.cluster.check()?;
        let row = session.ledger.execution(execution).await?.context("the execution is not in the ledger")?;
        if row.phase.is_terminal() || moved.elapsed() > STUCK_AFTER {
            return Ok((row, killed));
        }
        let now = session.ledger.rows_done(execution).await? as f64 / way.records() as f64;
        if now > at {
            (at, moved) = (now, Instant::now());
        }
        if moments.get(killed as usize).is_some_and(|moment| now >= *moment) {
            tokio::time::sleep(Duration::from_millis(random.random_range(0..JITTER_MS))).await;
            if kill_one(session, execution, random).await? {
                killed += 1;
                moved = Instant::now();
                session.voice.phase(&format!("{}: {killed} of {kills} workers killed", way.name()));
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Shares of the work at which a worker is killed, one in each of as many equal parts. Of a map the first is while it emits, if
/// there is another one for its tasks.
fn moments(way: Way, kills: u32, random: &mut StdRng) -> Vec<f64> {
    let part = way.killed_until(kills) / f64::from(kills.max(1));
    let mut moments: Vec<f64> = (0..kills).map(|n| (f64::from(n) + random.random_range(0.0..1.0)) * part).collect();
    if way == Way::Map && kills > 1 {
        moments[0] = 0.0;
    }
    moments
}

/// An id as the database's `HEX` writes it.
pub fn hex(execution: ExecutionId) -> String {
    execution.as_bytes().iter().map(|byte| format!("{byte:02X}")).collect()
}

/// False: nobody has any of it in hand at this moment. Its replacement starts at once: the dead one's shards are taken over from it,
/// not by its coming back.
async fn kill_one(session: &mut Session, execution: ExecutionId, random: &mut StdRng) -> Result<bool> {
    let sql =
        "SELECT HEX(owner), COUNT(*) FROM shards WHERE state = 1 AND HEX(execution_id) = ? GROUP BY owner ORDER BY 1";
    let owners = rows_of(&session.ledger, sql, &[SqlArg::Text(hex(execution))]).await?;
    let owners: Vec<String> = owners.into_iter().filter_map(|row| row.into_iter().next()).collect();
    let names = session.cluster.names(Role::Worker);
    if names.is_empty() {
        bail!("no worker runs");
    }
    let busy = |name: &String| session.cluster.incarnations(name).iter().any(|id| owners.contains(id));
    let victims: Vec<String> = names.into_iter().filter(busy).collect();
    if victims.is_empty() {
        return Ok(false);
    }
    let victim = &victims[random.random_range(0..victims.len())];
    session.cluster.kill(victim)?;
    session.cluster.start(Role::Worker)?;
    Ok(true)
}
