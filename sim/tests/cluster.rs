//! Seeds of the real actors: some hundreds that must live, and the proof that they could die.

use sim::cluster::{Broken, Host, Options, Report, run};
use sim::guard::Mutation;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

const SEEDS: u64 = 200;

/// Lives seeds on two threads, in any order, until one is wanted or all are lived.
fn live(seeds: u64, options: Options, wanted: fn(&Report) -> bool) -> io::Result<Vec<Report>> {
    let (host, next) = (Host::new()?, AtomicU64::new(0));
    let (sender, reports) = mpsc::channel();
    let lived = |sender: mpsc::Sender<io::Result<Report>>| {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return;
            }
            let report = run(&host, seed, options);
            if report.as_ref().is_ok_and(wanted) {
                next.store(seeds, Ordering::Relaxed);
            }
            let _ = sender.send(report);
        }
    };
    std::thread::scope(|scope| {
        let other = sender.clone();
        scope.spawn(|| lived(sender));
        scope.spawn(|| lived(other));
    });
    reports.into_iter().collect()
}

#[test]
fn two_hundred_seeds() {
    let reports = live(SEEDS, Options::default(), |_| false).unwrap();
    let failed: Vec<String> = reports
        .iter()
        .filter_map(|r| r.broken.as_ref().map(|(why, at)| format!("seed {}: {why} (after {at} ms)", r.seed)))
        .collect();
    assert!(failed.is_empty(), "replay with cargo run --release -p sim -- --seed S --trace\n{}", failed.join("\n"));
    // The lives are worth living: work, faults, and writes that came too late.
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    let (results, faults, refused) = (sum(|r| r.results), sum(|r| r.faults), sum(|r| r.refused));
    println!("{results} results, {faults} faults, {refused} refused writes, {} calls", sum(|r| r.calls.0));
    assert!(results > 3_000 && faults > 1_500 && refused > 300);
}

#[test]
fn a_seed_means_the_same_life_each_time() {
    let host = Host::new().unwrap();
    for seed in 0..12 {
        let (one, other) =
            (run(&host, seed, Options::default()).unwrap(), run(&host, seed, Options::default()).unwrap());
        assert!(one.calls.0 > 100);
        assert_eq!((one.calls, one.broken.clone()), (other.calls, other.broken), "seed {seed}");
        // Nor does looking change it.
        let looked_at = run(&host, seed, Options { trace: true, ..Options::default() }).unwrap();
        assert_eq!(one.calls, looked_at.calls, "seed {seed}");
    }
}

/// The invariant that a missing guard breaks first.
fn broken_by(mutation: Mutation) -> io::Result<String> {
    let options = Options { mutation: Some(mutation), ..Options::default() };
    let reports = live(SEEDS, options, |r| r.broken.is_some())?;
    let Some((report, (broken, at_ms))) = reports.iter().find_map(|r| Some((r, r.broken.as_ref()?))) else {
        panic!("{SEEDS} seeds live without a guard: {mutation:?}");
    };
    println!("{mutation:?}: seed {} of {} after {at_ms} ms: {broken}", report.seed, reports.len());
    Ok(match broken {
        Broken::Invariant(violation) => violation.id.to_string(),
        other => other.to_string(),
    })
}

#[test]
fn without_the_attempt_check_a_late_write_is_accepted() {
    assert_eq!(broken_by(Mutation::NoAttemptCheck).unwrap(), "S3");
}

#[test]
fn without_the_epoch_check_a_deposed_leader_writes() {
    assert_eq!(broken_by(Mutation::NoEpochCheck).unwrap(), "L1");
}

#[test]
fn acking_before_the_commit_is_noticed() {
    assert_eq!(broken_by(Mutation::AckBeforeCommit).unwrap(), "A1");
}

#[test]
fn emits_of_dead_attempts_are_noticed() {
    assert_eq!(broken_by(Mutation::EmitsOfDeadAttempts).unwrap(), "S5");
}

#[test]
fn an_addressed_shard_that_somebody_else_runs_is_noticed() {
    assert_eq!(broken_by(Mutation::AddressedToAnybody).unwrap(), "S5");
}

#[test]
fn a_record_that_is_done_before_its_transaction_is_noticed() {
    assert_eq!(broken_by(Mutation::DoneBeforeItsTransaction).unwrap(), "S1");
}

#[test]
fn a_checkpoint_without_its_fence_is_noticed() {
    // Of another attempt, or from where the ledger is not.
    let seen = broken_by(Mutation::CheckpointWithoutFence).unwrap();
    assert!(seen == "S3" || seen.contains("the checkpoint does not follow from the one in the ledger"), "{seen}");
}
