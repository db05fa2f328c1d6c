use super::*;
use proptest::prelude::*;

fn keys(names: &[&str]) -> Vec<Vec<u8>> {
    names.iter().map(|name| name.as_bytes().to_vec()).collect()
}

fn known(state: RecordState) -> Option<Known> {
    Some(Known { state, tries: 1 })
}

#[test]
fn started_and_retry_are_done_again_and_never_left_out() {
    use RecordState::{Done, Retry, Skipped, Started};
    let states = vec![None, known(Started), known(Done), known(Retry), known(Skipped)];
    let batch = Batch::new(keys(&["a", "b", "c", "d", "e"]), states).unwrap();
    assert_eq!(batch.open(), [0, 1, 3]);
    assert_eq!([0, 1, 3].map(|n| batch.is_again(n)), [false, true, true]);
}

#[test]
fn c_03_a_failed_record_leaves_the_others_done() {
    let mut batch = Batch::new(keys(&["1", "2", "3", "4", "5"]), vec![None; 5]).unwrap();
    batch.retry(1, "no such account");
    let settled = batch.settle(false, 0);
    let states: Vec<_> = settled.writes.iter().map(|w| (w.key[0], w.state, w.tries)).collect();
    let done = |key| (key, RecordState::Done, 0);
    assert_eq!(states, [(b'2', RecordState::Retry, 1), done(b'1'), done(b'3'), done(b'4'), done(b'5')]);
    let covered = batch.settle(true, 0);
    assert_eq!((covered.writes.len(), covered.erased.len()), (1, 0), "there are no rows of them yet");
    let covered = batch.noted().settle(true, 0);
    assert_eq!((covered.writes.len(), covered.erased.len()), (1, 4), "what failed outlives the checkpoint");
}

#[test]
fn c_01_one_too_many_stops_the_checkpoint() {
    let mut batch = Batch::new(keys(&["11", "12"]), vec![None; 2]).unwrap().skip_limit(3);
    batch.skip(0, "broken");
    assert_eq!(batch.settle(true, 2).over, None);
    let settled = batch.settle(true, 3);
    let over = settled.over.clone().unwrap();
    assert_eq!((over.limit, over.key.as_str()), (3, "11"));
    assert!(over.to_string().contains("record '11' failed: broken; the 3 records"), "{over}");
    assert!(settled.erased.is_empty(), "no checkpoint covers it");
    let states: Vec<_> = settled.writes.iter().map(|w| w.state).collect();
    assert_eq!(states, [RecordState::Retry, RecordState::Done]);
}

#[test]
fn i_03_long_keys_are_refused_and_never_cut() {
    let error = check_keys(&[vec![b'x'; 4_000]]).unwrap_err();
    assert!(error.contains("4000 bytes") && error.contains("never"), "{error}");
    check_keys(&[vec![b'x'; RECORD_KEY_BYTES]]).unwrap();
    assert!(check_keys(&[Vec::new()]).is_err());
    assert!(check_keys(&vec![vec![1]; RECORDS_PER_BATCH + 1]).is_err());
}

#[test]
fn keys_are_read_as_text_or_digits() {
    assert_eq!(key_text("k1 🦀".as_bytes()), "k1 🦀");
    assert_eq!(key_text(b"k\0"), "0x6b00");
    assert_eq!(key_text(&[0xff]), "0xff");
}

#[test]
fn states_keep_their_numbers() {
    for code in 0..4 {
        assert_eq!(RecordState::from_code(code).unwrap().code(), code);
    }
    assert_eq!(RecordState::from_code(4), None);
}

proptest! {
    /// Whatever a handler says: each record that was to be worked on is written or erased exactly once, no other is touched, and
    /// nothing that failed is forgotten.
    #[test]
    fn every_open_record_is_settled_once(
        rows in prop::collection::vec((0u8..20, prop::option::of(0i64..4), 0u8..3), 0..40),
        covered: bool,
        before in 0u32..4,
    ) {
        let names: Vec<Vec<u8>> = rows.iter().map(|(key, _, _)| vec![*key]).collect();
        // The table has one row for a key.
        let state_of = |key: u8| rows.iter().find(|(k, _, _)| *k == key).and_then(|(_, state, _)| *state);
        let states = rows.iter().map(|(key, _, _)| {
            state_of(*key).and_then(RecordState::from_code).map(|state| Known { state, tries: 0 })
        }).collect();
        let mut batch = Batch::new(names, states).unwrap().noted().skip_limit(3);
        let open = batch.open();
        for n in &open {
            match rows[*n].2 {
                0 => {}
                1 => batch.retry(*n, "later"),
                _ => batch.skip(*n, "never"),
            }
        }
        let settled = batch.settle(covered, before);
        let mut touched: Vec<&[u8]> = settled.writes.iter().map(|w| w.key.as_slice()).collect();
        touched.extend(settled.erased.iter().map(Vec::as_slice));
        touched.sort_unstable();
        let mut wanted: Vec<&[u8]> = open.iter().map(|n| batch.key(*n)).collect();
        wanted.sort_unstable();
        prop_assert_eq!(touched, wanted);
        for n in &open {
            if rows[*n].2 != 0 {
                let write = settled.writes.iter().find(|w| w.key == batch.key(*n)).unwrap();
                prop_assert!(write.state != RecordState::Done && write.message.is_some());
            }
        }
        let skipped = settled.writes.iter().filter(|w| w.state == RecordState::Skipped).count();
        prop_assert!(skipped + before as usize <= 3 || skipped == 0);
        prop_assert!(settled.over.is_none() || settled.erased.is_empty());
    }
}
