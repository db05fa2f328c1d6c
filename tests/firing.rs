//! F1 and F2 in a real cluster: every instant is fired once, whoever leads.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_store::{Ledger, SqlArg};
use std::fmt::Write;
use std::time::{Duration, Instant};
use support::Cluster;

const JOBS: usize = 100;

fn per_second_jobs() -> String {
    let mut file = String::new();
    for n in 0..JOBS {
        writeln!(
            file,
            "[job.tick-{n:03}]\nschedule = {{ cron = \"* * * * * *\" }}\nhandler = {{ rust = \"noop\" }}\noverlap = \"allow\"\n\
             misfire = {{ policy = \"fire_all\", grace = \"1m\", limit = 100 }}"
        )
        .unwrap();
    }
    file
}

/// Counts, over all jobs, the seconds between the first and the last decision that lack one, those decided without firing, and
/// those fired twice.
fn audit(cluster: &Cluster) -> (i64, i64, i64, i64) {
    let ledger = cluster.ledger();
    let jobs = cluster.block_on(ledger.jobs()).unwrap();
    let (mut fired, mut missing, mut unfired) = (0, 0, 0);
    for job in &jobs {
        let decisions = cluster.block_on(ledger.decisions(job.id, 0, i64::MAX, 100_000)).unwrap();
        let (first, last) = (decisions.first().unwrap().nominal_ms, decisions.last().unwrap().nominal_ms);
        missing += (last - first) / 1_000 + 1 - decisions.len() as i64;
        unfired += decisions.iter().filter(|d| d.execution.is_none()).count() as i64;
        fired += decisions.len() as i64;
    }
    let twice = cluster.number("SELECT COUNT(*) FROM (SELECT job_id, nominal_ms FROM executions GROUP BY job_id, nominal_ms HAVING COUNT(*) > 1) t");
    (fired, missing, unfired, twice)
}

/// A hundred jobs a second for a minute; the leader is killed three times; the other one takes over each time.
#[test]
fn f1_f2_h_03_every_instant_is_fired_once_while_leaders_are_killed() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&per_second_jobs());
    cluster.start_all(2, 1);
    let began = Instant::now();
    let (mut epoch, mut killed) = (0, 0);
    let executions = |cluster: &Cluster| cluster.number("SELECT COUNT(*) FROM executions");
    while began.elapsed() < Duration::from_secs(60) {
        let (leader, now) = cluster.wait_leader(epoch);
        epoch = now;
        let before = executions(&cluster);
        // The next fault only once this leader has fired for some seconds.
        testkit::wait_for("the new leader to fire", Duration::from_secs(30), || {
            executions(&cluster) > before + 8 * JOBS as i64
        });
        if killed == 3 {
            let rest = Duration::from_secs(60).saturating_sub(began.elapsed());
            let target = executions(&cluster) + JOBS as i64 * rest.as_secs() as i64;
            testkit::wait_for("the minute to end", Duration::from_secs(90), || executions(&cluster) >= target);
            break;
        }
        cluster.kill(&leader);
        killed += 1;
        cluster.start("scheduler", &leader);
    }
    assert_eq!(killed, 3);
    let (fired, missing, unfired, twice) = audit(&cluster);
    assert!(fired >= 55 * JOBS as i64, "{fired} firings in a minute");
    assert_eq!((missing, unfired, twice), (0, 0, 0), "of {fired}: missing, decided without firing, fired twice");
    // What was fired also ran: each execution of one shard ends.
    let fired_last = cluster.number("SELECT MAX(fired_ms) FROM executions");
    testkit::wait_for("what was fired to end", Duration::from_secs(60), || {
        cluster.number(&format!("SELECT COUNT(*) FROM executions WHERE fired_ms <= {fired_last} AND state = 0")) == 0
    });
    assert_eq!(cluster.number("SELECT COUNT(*) FROM executions WHERE state > 1"), 0, "none failed");
}

/// A frozen leader wakes as a zombie: the ledger refuses its epoch, and it stands by (E-02).
#[test]
fn e_02_a_leader_that_wakes_as_a_zombie_writes_nothing() {
    let mut cluster = Cluster::on_services();
    cluster.apply(&per_second_jobs());
    cluster.start_all(2, 1);
    let (zombie, epoch) = cluster.wait_leader(0);
    testkit::wait_for("firings", Duration::from_secs(30), || cluster.number("SELECT COUNT(*) FROM executions") > 0);
    cluster.signal(&zombie, nix::sys::signal::Signal::SIGSTOP);
    let (leader, later) = cluster.wait_leader(epoch);
    assert_ne!(leader, zombie);
    let count = cluster.number("SELECT COUNT(*) FROM executions");
    testkit::wait_for("the new leader to fire", Duration::from_secs(30), || {
        cluster.number("SELECT COUNT(*) FROM executions") > count + 3 * JOBS as i64
    });
    cluster.signal(&zombie, nix::sys::signal::Signal::SIGCONT);
    cluster.wait_log(&zombie, "standing by reason", Duration::from_secs(10));
    testkit::wait_for("the cluster to go on", Duration::from_secs(30), || {
        cluster.number("SELECT COUNT(*) FROM executions") > count + 6 * JOBS as i64
    });
    assert_eq!(cluster.wait_leader(epoch).1, later, "the zombie did not lead again");
    let (_, missing, unfired, twice) = audit(&cluster);
    assert_eq!((missing, unfired, twice), (0, 0, 0));
    let rows = cluster.block_on(
        cluster
            .ledger()
            .query("SELECT epoch, MIN(fired_ms), MAX(fired_ms) FROM executions GROUP BY epoch ORDER BY epoch", &[]),
    );
    let rows = rows.unwrap();
    let [SqlArg::Int(_), _, SqlArg::Int(old_last)] = rows[0].as_slice() else { panic!("{rows:?}") };
    let [SqlArg::Int(_), SqlArg::Int(new_first), _] = rows[1].as_slice() else { panic!("{rows:?}") };
    assert!(old_last <= new_first, "L1: nothing of the old epoch after the first of the new one");
}

/// A lease that was lost with its leader is free after its time, never for ever (E-03).
#[test]
fn e_03_the_lease_ends_with_its_holder() {
    let mut cluster = Cluster::on_services();
    cluster.start_all(2, 0);
    let (leader, epoch) = cluster.wait_leader(0);
    cluster.kill(&leader);
    let began = Instant::now();
    cluster.wait_leader(epoch);
    assert!(began.elapsed() < Duration::from_secs(4), "lease of 2 s, taken over after {:?}", began.elapsed());
}
