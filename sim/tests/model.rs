//! The model checker's runs: exhaustive at these bounds, and proved able to fail.

use sim::guard::Mutation;
use sim::model::{Bounds, Protocol, State};
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// One shard, everything that can happen to it, any two faults.
const DEEP: Bounds = Bounds { instants: 1, shards: 1, attempts: 2, checkpoints: true, faults: 2, mutation: None };
/// Two shards beside each other, any one fault.
const WIDE: Bounds = Bounds { shards: 2, checkpoints: false, faults: 1, ..DEEP };
/// Two firings, one after or over the other, any one fault.
const LONG: Bounds = Bounds { instants: 2, faults: 1, ..DEEP };

/// The number of states is asserted, so that nobody shrinks the world unnoticed. After a change of the model that is meant to
/// change it: look at why, and write the new number here.
fn explore(bounds: Bounds, states: usize) {
    let checker = Protocol(bounds).checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!(
        "{} states, {} ways on, depth {}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth()
    );
    assert_eq!(checker.unique_state_count(), states);
}

#[test]
fn one_shard_with_two_faults() {
    explore(DEEP, 202_494);
}

#[test]
fn two_shards_with_a_fault() {
    explore(WIDE, 90_347);
}

#[test]
fn two_firings_with_a_fault() {
    explore(LONG, 83_357);
}

#[test]
#[ignore = "minutes, and gigabytes; before a release, and after a change of the protocol"]
fn two_shards_with_two_faults() {
    explore(Bounds { faults: 2, ..WIDE }, 21_406_889);
}

#[test]
#[ignore = "minutes, and gigabytes; before a release, and after a change of the protocol"]
fn two_firings_with_two_faults() {
    explore(Bounds { faults: 2, checkpoints: false, ..LONG }, 4_737_537);
}

#[test]
#[ignore = "minutes, and gigabytes; before a release, and after a change of the protocol"]
fn one_shard_with_three_faults() {
    explore(Bounds { faults: 3, checkpoints: false, ..DEEP }, 3_237_618);
}

fn fingerprint(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// The second half of P1: a way that goes on for ever would have to come back to a state that it has been in.
fn assert_no_cycle(bounds: Bounds) {
    let model = Protocol(bounds);
    let next = |state: &State| -> Vec<State> {
        let mut actions = Vec::new();
        model.actions(state, &mut actions);
        actions.into_iter().filter_map(|a| model.next_state(state, a)).collect()
    };
    // On the way: true. Left behind: false.
    let mut seen: HashMap<u64, bool> = HashMap::new();
    let mut way: Vec<(u64, Vec<State>)> = Vec::new();
    for state in model.init_states() {
        seen.insert(fingerprint(&state), true);
        way.push((fingerprint(&state), next(&state)));
    }
    while let Some((here, ways_on)) = way.last_mut() {
        let Some(state) = ways_on.pop() else {
            seen.insert(*here, false);
            way.pop();
            continue;
        };
        let there = fingerprint(&state);
        match seen.get(&there) {
            Some(true) => panic!("the way goes round in a circle: {state:?}"),
            Some(false) => {}
            None => {
                seen.insert(there, true);
                way.push((there, next(&state)));
            }
        }
    }
}

#[test]
fn every_way_ends() {
    [DEEP, WIDE, LONG].into_iter().for_each(assert_no_cycle);
}

/// What a missing guard breaks, after how many states it is found, and how.
fn broken_by(mutation: Mutation) -> &'static str {
    let bounds = Bounds { mutation: Some(mutation), ..DEEP };
    let finish = HasDiscoveries::AnyFailures;
    // One thread: the same counter-example each time.
    let checker = Protocol(bounds).checker().finish_when(finish).spawn_bfs().join();
    let always = ["F1", "S1", "S2", "S3", "S4", "L1", "A1", "O1", "P1"];
    let Some((name, path)) = checker.discoveries().into_iter().find(|(name, _)| always.contains(name)) else {
        panic!("nothing breaks without a guard: {mutation:?}");
    };
    println!("{mutation:?}: {name} is broken, found after {} states:", checker.unique_state_count());
    path.into_actions().iter().for_each(|action| println!("  {action:?}"));
    name
}

#[test]
fn without_the_attempt_check_a_late_write_is_accepted() {
    assert_eq!(broken_by(Mutation::NoAttemptCheck), "S3");
}

#[test]
fn without_the_epoch_check_a_deposed_leader_writes() {
    assert_eq!(broken_by(Mutation::NoEpochCheck), "L1");
}

#[test]
fn acking_before_the_commit_is_noticed() {
    assert_eq!(broken_by(Mutation::AckBeforeCommit), "A1");
}
