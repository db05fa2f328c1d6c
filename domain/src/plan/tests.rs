use super::*;
use crate::limits::SHARDS_LIST_BYTES;
use proptest::prelude::*;

#[test]
fn the_worked_example_of_ten_shards() {
    let plan = ShardPlan::Range { from: 1, to: 100_000, count: 10 };
    assert_eq!(plan.slice(0), Some(ShardSlice::Range { from: 1, to: 10_000 }));
    assert_eq!(plan.slice(9), Some(ShardSlice::Range { from: 90_001, to: 100_000 }));
    assert_eq!(plan.slice(10), None);
}

#[test]
fn wrong_specifications_say_what_would_be_right() {
    let spec = |s: ShardsSpec| ShardPlan::from_spec(&s).map_err(|e| e.to_string());
    let range = Some(RangeSpec { from: 1, to: 10 });
    assert!(spec(ShardsSpec { range, count: Some(11), ..Default::default() }).is_err());
    assert!(spec(ShardsSpec { range, count: Some(0), ..Default::default() }).is_err());
    assert!(spec(ShardsSpec { range, size: Some(0), ..Default::default() }).is_err());
    assert!(spec(ShardsSpec { range, modulo: Some(2), ..Default::default() }).is_err());
    assert!(spec(ShardsSpec { modulo: Some(SHARDS_MAX + 1), ..Default::default() }).is_err());
    assert_eq!(spec(ShardsSpec::default()), Ok(ShardPlan::Modulo { total: 1 }));
    assert_eq!(
        spec(ShardsSpec { range, size: Some(3), ..Default::default() }),
        Ok(ShardPlan::Range { from: 1, to: 10, count: 4 })
    );
}

#[test]
fn a_list_is_bounded_by_its_json() {
    let of = |bytes: usize| {
        // The brackets and quotes of two items and the comma between them are seven bytes.
        let list = Some(vec!["x".repeat(bytes - 8), "y".into()]);
        ShardPlan::from_spec(&ShardsSpec { list, ..Default::default() })
    };
    assert_eq!(of(SHARDS_LIST_BYTES).map(|plan| plan.count()), Ok(2));
    let error = of(SHARDS_LIST_BYTES + 1).unwrap_err();
    assert_eq!(error.key, ".list");
    assert!(error.message.contains("262145 bytes") && error.message.contains("range or modulo"), "{error}");
}

proptest! {
    #[test]
    fn s5_a_range_is_covered_exactly(from in i64::MIN..i64::MAX, length in 1u64..2_000_000, count in 1u32..3_000) {
        prop_assume!(u64::from(count) <= length && from.checked_add_unsigned(length - 1).is_some());
        let to = from.wrapping_add_unsigned(length - 1);
        let plan = ShardPlan::Range { from, to, count };
        let mut next = Some(from);
        for index in 0..count {
            let Some(ShardSlice::Range { from: a, to: b }) = plan.slice(index) else { panic!("no slice {index}") };
            prop_assert_eq!(Some(a), next, "gap or overlap before shard {}", index);
            prop_assert!(b >= a);
            next = b.checked_add(1);
        }
        prop_assert_eq!(next, to.checked_add(1));
    }

    #[test]
    fn s5_a_list_is_covered_exactly(length in 1usize..300, count in 1u32..300) {
        prop_assume!(count as usize <= length);
        let items: Vec<String> = (0..length).map(|i| i.to_string()).collect();
        let plan = ShardPlan::List { items: items.clone(), count };
        let mut seen = Vec::new();
        for index in 0..count {
            let Some(ShardSlice::List { items }) = plan.slice(index) else { panic!("no slice {index}") };
            prop_assert!(!items.is_empty());
            seen.extend(items);
        }
        prop_assert_eq!(seen, items);
    }

    #[test]
    fn s5_slots_are_covered_exactly(count in 1u32..=SLOTS) {
        let plan = ShardPlan::from_spec(&ShardsSpec { slots: Some(count), ..ShardsSpec::default() }).unwrap();
        let mut next = 0;
        for index in 0..plan.count() {
            let Some(ShardSlice::Slots { from, to }) = plan.slice(index) else { panic!("no slice {index}") };
            prop_assert_eq!(from, next);
            prop_assert!(to >= from);
            next = to + 1;
        }
        prop_assert_eq!(next, SLOTS);
    }

    #[test]
    fn s5_a_range_that_is_cut_anew_is_covered_exactly(
        from in i64::MIN..i64::MAX - 1_000_000, cuts in prop::collection::btree_set(1u64..1_000_000, 0..50),
    ) {
        let to = from + 999_999;
        let starts = std::iter::once(0).chain(cuts).collect();
        let plan = ShardPlan::Cuts { of: Box::new(ShardPlan::Range { from, to, count: 1 }), starts };
        let mut next = from;
        for index in 0..plan.count() {
            let Some(ShardSlice::Range { from: a, to: b }) = plan.slice(index) else { panic!("no slice {index}") };
            prop_assert_eq!(a, next);
            prop_assert!(b >= a);
            next = b + 1;
        }
        prop_assert_eq!(next, to + 1);
    }
}
