//! Seeds of the large world: some hundreds that must live, and the proof that they could die.

use sim::guard::Mutation;
use sim::world::{Options, Report, run};

const SEEDS: u64 = 300;

#[test]
fn three_hundred_seeds() {
    let reports: Vec<Report> = (0..SEEDS).map(|seed| run(seed, Options::default())).collect();
    let failed: Vec<String> = reports
        .iter()
        .filter_map(|r| r.broken.as_ref().map(|(why, at)| format!("seed {}: {why} (after {at} ms)", r.seed)))
        .collect();
    assert!(failed.is_empty(), "replay with cargo run --release -p sim -- --seed S --trace\n{}", failed.join("\n"));
    // The worlds are worth living in: work, faults, and writes that came too late.
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    let (results, faults, refused) = (sum(|r| r.results), sum(|r| r.faults), sum(|r| r.refused));
    println!("{results} results, {faults} faults, {refused} refused writes, {} events", sum(|r| r.events));
    assert!(results > 5_000 && faults > 3_000 && refused > 500);
}

#[test]
fn a_seed_means_the_same_world_each_time() {
    for seed in [1, 17, 115] {
        let options = Options { trace: true, ..Options::default() };
        let (one, other) = (run(seed, options), run(seed, options));
        assert!(one.trace.len() > 10);
        assert_eq!(one.trace, other.trace);
        assert_eq!(one.events, other.events);
        // Nor does looking change it.
        assert_eq!(one.events, run(seed, Options::default()).events);
    }
}

/// The invariant that a missing guard breaks first, and the seed that shows it.
fn broken_by(mutation: Mutation, seeds: u64) -> String {
    for seed in 0..seeds {
        let report = run(seed, Options { mutation: Some(mutation), ..Options::default() });
        if let Some((violation, at_ms)) = report.broken {
            println!("{mutation:?}: seed {seed} after {at_ms} ms: {violation}");
            return violation.id.to_string();
        }
    }
    panic!("{seeds} seeds live without a guard: {mutation:?}");
}

#[test]
fn without_the_attempt_check_a_late_write_is_accepted() {
    assert_eq!(broken_by(Mutation::NoAttemptCheck, SEEDS), "S3");
}

#[test]
fn without_the_epoch_check_a_deposed_leader_writes() {
    assert_eq!(broken_by(Mutation::NoEpochCheck, SEEDS), "L1");
}

#[test]
fn acking_before_the_commit_is_noticed() {
    assert_eq!(broken_by(Mutation::AckBeforeCommit, SEEDS), "A1");
}

#[test]
fn a_timer_that_is_not_set_again_ends_all_firing() {
    assert_eq!(broken_by(Mutation::ForgetTimer, 10 * SEEDS), "P1");
}

#[test]
fn a_queue_that_is_never_seen_empty_hides_what_is_lost() {
    assert_eq!(broken_by(Mutation::OnlyIfEmpty, 10 * SEEDS), "P1");
}
