//! What stands around a pattern: bounds, exceptions, jitter, fixed delays, and what an earlier schedule still owes.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use shardcron_domain::firing::{DecisionKind, Due, Intent, due};
use shardcron_domain::job::{Misfire, MisfirePolicy};
use shardcron_domain::limits::{INSTANTS_WALKED, MISSED_INSTANTS};
use shardcron_domain::schedule::{Coming, ExceptionPool, Schedule, ScheduleSpec, coming};
use shardcron_domain::units::{Span, parse_instant, rfc3339};

fn ms(text: &str) -> i64 {
    parse_instant(text).unwrap()
}

fn read(toml: &str) -> ScheduleSpec {
    let text = format!("[job.a]\nhandler = {{ rust = \"noop\" }}\nschedule = {{ {toml} }}\n");
    let spec = shardcron_domain::jobfile::parse(&text).unwrap_or_else(|e| panic!("{toml}: {e}")).remove(0);
    spec.schedule.unwrap()
}

fn schedule(toml: &str) -> Schedule {
    read(toml).compile_for("a").unwrap()
}

fn refused(toml: &str) -> String {
    let text = format!("[job.a]\nhandler = {{ rust = \"noop\" }}\nschedule = {{ {toml} }}\n");
    shardcron_domain::jobfile::parse(&text).expect_err(toml).message
}

/// The next instants that fire, and the skipped ones with their exceptions.
fn next(schedule: &Schedule, from: &str, count: usize) -> (Vec<String>, Vec<(String, String)>) {
    let (list, _) = coming(schedule, ms(from), count).unwrap();
    let (mut fires, mut skipped) = (Vec::new(), Vec::new());
    for one in list {
        match one {
            Coming::Fires { nominal_ms, .. } => fires.push(rfc3339(nominal_ms)),
            Coming::Skipped { first_ms, exception, .. } => skipped.push((rfc3339(first_ms), exception)),
            Coming::Lost { at_ms, clock_change } => skipped.push((rfc3339(at_ms), clock_change)),
        }
    }
    (fires, skipped)
}

#[test]
fn from_and_until_bound_a_schedule_both_included() {
    let bounded = schedule(
        "every = \"1h\", from = \"2026-01-01T10:00:00Z\", until = \"2026-01-01T14:00:00\", timezone = \"Europe/Berlin\"",
    );
    let (fires, _) = next(&bounded, "2025-01-01T00:00:00Z", 9);
    assert_eq!(fires, ["2026-01-01T10:00:00Z", "2026-01-01T11:00:00Z", "2026-01-01T12:00:00Z", "2026-01-01T13:00:00Z"]);
    assert_eq!(bounded.next_after(ms("2026-01-01T13:00:00Z")), Ok(None));
    assert!(
        refused("every = \"1h\", from = \"2026-01-02T00:00:00Z\", until = \"2026-01-01T00:00:00Z\"").contains("until")
    );
    assert!(refused("every = \"1h\", from = \"2026-01-02\"").contains("from:"));
    assert!(
        refused("at = \"2026-01-02T00:00:00Z\", until = \"2026-01-03T00:00:00Z\"").contains("at names one instant")
    );
}

#[test]
fn exceptions_are_days_of_the_jobs_zone() {
    let daily = schedule(
        "cron = \"0 22 * * *\", timezone = \"America/New_York\", except = [\"2026-12-24..2026-12-26\", \"cron: * * * * 6,0\"]",
    );
    // 22:00 in New York is the next day in UTC.
    let (fires, skipped) = next(&daily, "2026-12-23T12:00:00Z", 2);
    assert_eq!(fires, ["2026-12-24T03:00:00Z", "2026-12-29T03:00:00Z"]);
    assert_eq!(
        skipped,
        [
            ("2026-12-25T03:00:00Z".to_owned(), "2026-12-24..2026-12-26".to_owned()),
            ("2026-12-28T03:00:00Z".to_owned(), "cron: * * * * 6,0".to_owned())
        ]
    );
    let (list, _) = coming(&daily, ms("2026-12-23T12:00:00Z"), 2).unwrap();
    assert!(matches!(&list[1], Coming::Skipped { count: 3, .. }), "runs by the same exception are one entry: {list:?}");
}

#[test]
fn a_pattern_of_five_fields_excepts_whole_minutes() {
    let seconds = schedule("cron = \"*/20 * * * * *\", except = [\"cron: 1 0 * * *\"]");
    let (fires, _) = next(&seconds, "2026-01-01T00:00:40Z", 1);
    assert_eq!(fires, ["2026-01-01T00:02:00Z"]);
    let one = schedule("cron = \"*/20 * * * * *\", except = [\"cron: 20 1 0 * * *\"]");
    assert_eq!(next(&one, "2026-01-01T00:00:40Z", 2).0, ["2026-01-01T00:01:00Z", "2026-01-01T00:01:40Z"]);
}

#[test]
fn exceptions_say_what_is_wrong_with_them() {
    for (except, words) in [
        ("25.12.2026", "is not a day"),
        ("2026-02-30", "is not a day"),
        ("2026-12-31..2026-12-24", "ends before it begins"),
        ("cron: 0 61 * * *", "not from 0 to 23"),
        ("calendar: holidays.txt", "calendar"),
    ] {
        let message = refused(&format!("cron = \"@daily\", except = [\"{except}\"]"));
        assert!(message.contains(words), "{except}: {message}");
    }
    assert!(refused("cron = \"@daily\", calendars = { x = [\"2026-01-01\"] }").contains("no exception names"));
    let many = vec!["\"2026-01-01\""; 101].join(",");
    assert!(refused(&format!("cron = \"@daily\", except = [{many}]")).contains("100 are possible"));
}

#[test]
fn calendars_name_their_days() {
    let daily = schedule(
        "cron = \"@daily\", except = [\"calendar: de\"], calendars = { de = [\"2026-12-25..2026-12-26 Christmas\", \"2026-12-25\"] }",
    );
    assert_eq!(daily.exception(ms("2026-12-25T00:00:00Z")).unwrap(), "calendar: de (2026-12-25)");
    assert_eq!(daily.exception(ms("2026-12-26T00:00:00Z")).unwrap(), "calendar: de (2026-12-25..2026-12-26 Christmas)");
    assert_eq!(daily.exception(ms("2026-12-27T00:00:00Z")), None);
}

/// Everything that is decided, by whole passes as the leader makes them.
fn passes(schedule: &Schedule, policy: &MisfirePolicy, first: i64, now: i64) -> (Vec<Intent>, Option<i64>) {
    let (mut all, mut at) = (Vec::new(), Some(first));
    while let Some(next) = at {
        let Due { intents, next_fire_ms } = due(schedule, policy, next, now).unwrap();
        assert!(intents.len() <= MISSED_INSTANTS + 1);
        if intents.is_empty() {
            break;
        }
        all.extend(intents);
        at = next_fire_ms;
    }
    (all, at)
}

fn fired(intents: &[Intent]) -> Vec<i64> {
    intents.iter().filter(|i| matches!(i, Intent::Fire { .. })).map(Intent::nominal_ms).collect()
}

#[test]
fn f2_each_excepted_instant_has_its_decision_and_neither_fires_nor_stands_for_others() {
    // Down over a weekend that is excepted: Friday's last missed instant fires, not a Saturday's.
    let hourly = schedule("every = \"1h\", except = [\"cron: * * * * 6,0\"]");
    let now = ms("2026-11-29T12:30:00Z");
    let policy = MisfirePolicy::default();
    let (all, next) = passes(&hourly, &policy, ms("2026-11-27T20:00:00Z"), now);
    assert_eq!(fired(&all), [ms("2026-11-27T23:00:00Z")]);
    let skipped = all.iter().filter(
        |i| matches!(i, Intent::Record { kind: DecisionKind::SkippedException, reason, .. } if reason.contains("cron: * * * * 6,0")),
    );
    assert_eq!((skipped.count(), all.len()), (24 + 13, 24 + 13 + 4));
    assert_eq!(next, Some(ms("2026-11-29T13:00:00Z")));
}

#[test]
fn f2_a_long_run_of_excepted_instants_is_worked_off_in_bounded_passes() {
    // Three hours of seconds, all excepted but the first.
    let schedule =
        schedule("every = \"1s\", except = [\"cron: * 1-23 * * *\", \"cron: 1-59 0 * * *\", \"cron: 1-59 0 0 * * *\"]");
    let first = ms("2026-01-01T00:00:00Z");
    let now = ms("2026-01-01T03:00:00Z");
    let (all, _) = passes(&schedule, &MisfirePolicy::default(), first, now);
    assert_eq!(fired(&all), [first], "the only one that may fire does, however many excepted ones follow it");
    assert_eq!(all.len(), 3 * 3_600 + 1);
    let one_pass = due(&schedule, &MisfirePolicy::default(), first, now).unwrap();
    assert_eq!(one_pass.intents.len(), MISSED_INSTANTS);
}

#[test]
fn a_schedule_whose_every_instant_is_excepted_is_given_up_soon() {
    let nothing = schedule("every = \"1s\", except = [\"cron: * * * * *\"]");
    let began = std::time::Instant::now();
    let (list, given_up) = coming(&nothing, ms("2026-01-01T00:00:00Z"), 3).unwrap();
    assert!(given_up && matches!(list[..], [Coming::Skipped { count: INSTANTS_WALKED, .. }]), "{list:?}");
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
}

#[test]
fn equal_exceptions_are_held_once() {
    let mut pool = ExceptionPool::default();
    let text = "cron = \"@daily\", except = [\"2026-12-25\"]";
    let (mut one, mut two) = (schedule(text), schedule(text));
    one.share(&mut pool);
    two.share(&mut pool);
    for schedule in [&one, &two] {
        assert!(schedule.is_excepted(ms("2026-12-25T00:00:00Z")));
    }
    // A leader holds a hundred thousand: what few have is behind a pointer.
    assert!(size_of::<Schedule>() <= 48, "{}", size_of::<Schedule>());
}

#[test]
fn a_fixed_delay_has_one_instant_that_follows_the_end() {
    let delay = schedule("delay = \"10m\", from = \"2026-01-01T00:00:00Z\", until = \"2026-01-02T00:00:00Z\"");
    let at = |ended: Option<&str>, now| delay.next_after_end(ended.map(ms), ms(now)).map(rfc3339);
    assert_eq!(at(None, "2026-01-01T05:00:00Z").unwrap(), "2026-01-01T05:00:00Z", "at once");
    assert_eq!(at(None, "2025-12-01T00:00:00Z").unwrap(), "2026-01-01T00:00:00Z", "but not before it begins");
    assert_eq!(at(Some("2026-01-01T05:00:07Z"), "2026-01-01T09:00:00Z").unwrap(), "2026-01-01T05:10:07Z");
    assert_eq!(at(Some("2026-01-01T23:55:00Z"), "2026-01-01T23:56:00Z"), None, "over");
    assert_eq!(delay.next_after(0), Ok(None), "it is not known before the end");
    let looked =
        due(&delay, &MisfirePolicy::default(), ms("2026-01-01T05:10:07Z"), ms("2026-01-01T05:10:08Z")).unwrap();
    assert_eq!((looked.intents.len(), looked.next_fire_ms), (1, None));
    assert_eq!(schedule("every = \"1h\"").next_after_end(None, 0), None);
    assert!(refused("delay = \"0s\"").contains("without a pause"));
    assert!(refused("delay = \"1s\", every = \"1s\"").contains("exactly one"));
}

#[test]
fn what_an_earlier_schedule_owes_comes_first() {
    let until = ms("2026-01-01T02:10:00Z");
    let (old, older) = (schedule("every = \"1h\", except = [\"cron: 0 1 * * *\"]"), schedule("every = \"30m\""));
    let new = schedule("every = \"25m\"").after(vec![(older, ms("2026-01-01T00:40:00Z")), (old, until)]);
    let mut at = ms("2025-12-31T23:50:00Z");
    let mut found = Vec::new();
    for _ in 0..6 {
        at = new.next_after(at).unwrap().unwrap();
        found.push((rfc3339(at)[11..16].to_owned(), new.is_excepted(at)));
    }
    let wanted =
        [("00:00", false), ("00:30", false), ("01:00", true), ("02:00", false), ("02:20", false), ("02:45", false)];
    assert_eq!(found, wanted.map(|(t, e)| (t.to_owned(), e)));
    let never = Schedule::never().after(vec![(schedule("every = \"1h\""), until)]);
    assert_eq!(never.next_after(ms("2026-01-01T01:30:00Z")), Ok(Some(ms("2026-01-01T02:00:00Z"))));
    assert_eq!(never.next_after(ms("2026-01-01T02:00:00Z")), Ok(None));
}

#[test]
fn the_days_of_a_clock_change_are_marked() {
    let mark = |toml: &str, from: &str| {
        let (list, _) = coming(&schedule(toml), ms(from), 1).unwrap();
        let Coming::Fires { clock_change, .. } = &list[0] else { panic!("{list:?}") };
        clock_change.clone()
    };
    let new_york = |pattern: &str| format!("cron = \"{pattern}\", timezone = \"America/New_York\"");
    assert_eq!(
        mark(&new_york("30 2 * * *"), "2025-03-09T00:00:00Z").unwrap(),
        "clocks go forward from 02:00 to 03:00: 02:30 does not exist, fires 03:00"
    );
    assert_eq!(
        mark(&new_york("30 12 * * *"), "2025-03-09T05:00:00Z").unwrap(),
        "clocks go forward from 02:00 to 03:00"
    );
    assert_eq!(
        mark(&new_york("30 1 * * *"), "2025-11-02T00:00:00Z").unwrap(),
        "clocks go back from 02:00 to 01:00: this time comes twice, fires the first time"
    );
    assert_eq!(
        mark(&new_york("*/30 * * * *"), "2025-11-02T06:00:00Z").unwrap(),
        "clocks go back from 02:00 to 01:00: the second time"
    );
    for quiet in ["2025-03-08T00:00:00Z", "2025-03-10T05:00:00Z", "2025-11-01T00:00:00Z", "2025-11-03T06:00:00Z"] {
        assert_eq!(mark(&new_york("30 2 * * *"), quiet), None, "{quiet}");
    }
    assert_eq!(mark("cron = \"30 2 * * *\"", "2025-03-09T00:00:00Z"), None);
}

/// With `gap = "skip"` nothing fires on that day, and the list says why. What follows elapsed time loses nothing.
#[test]
fn a_day_that_the_clock_takes_away_is_marked() {
    let new_york =
        |pattern: &str, rest: &str| schedule(&format!("cron = \"{pattern}\", timezone = \"America/New_York\"{rest}"));
    let skip = ", dst = { gap = \"skip\" }";
    let lost = |schedule: &Schedule, from: &str, count: usize| next(schedule, from, count);
    let (fires, marks) = lost(&new_york("0,30 2 * * *", skip), "2025-03-08T12:00:00Z", 2);
    assert_eq!(fires, ["2025-03-10T06:00:00Z", "2025-03-10T06:30:00Z"]);
    let words = "clocks go forward from 02:00 to 03:00: 02:00 does not exist, does not fire";
    assert_eq!(marks, [("2025-03-09T07:00:00Z".to_owned(), words.to_owned())], "one mark for the day");
    // Two springs between two firings, and a year whose change touches nothing.
    let (_, marks) = lost(&new_york("30 2 9 3 *", skip), "2024-06-01T00:00:00Z", 2);
    assert_eq!(marks.iter().map(|(at, _)| at.as_str()).collect::<Vec<_>>(), ["2025-03-09T07:00:00Z"]);
    for quiet in [
        new_york("30 2 * * *", ""),
        new_york("*/10 * * * *", ""),
        new_york("*/10 * * * *", skip),
        new_york("30 4 * * *", skip),
        new_york("30 2 * * *", ", from = \"2025-03-09T12:00:00Z\", dst = { gap = \"skip\" }"),
        schedule("cron = \"30 2 * * *\""),
        schedule("every = \"1d\""),
    ] {
        assert_eq!(lost(&quiet, "2025-03-08T12:00:00Z", 2).1, [], "{quiet:?}");
    }
    // Both passes of a repeated hour are no loss, with any choice.
    for fold in ["first", "second", "both"] {
        let folded = new_york("0-59 1 * * *", &format!(", dst = {{ fold = \"{fold}\" }}"));
        assert_eq!(lost(&folded, "2025-11-01T12:00:00Z", 200).1, [], "{fold}");
    }
    // A day that the calendar itself left out.
    let samoa = schedule("cron = \"0 12 * * *\", timezone = \"Pacific/Apia\"");
    let (_, marks) = lost(&samoa, "2011-12-29T00:00:00Z", 2);
    assert_eq!(marks.len(), 1, "{marks:?}");
}

proptest! {
    /// A jitter is never before its instant, never as late as the next one, and the same each time.
    #[test]
    fn jitter_stays_between_two_instants(every_s in 1_u64..5_000, jitter_s in 1_u64..10_000, start in 0_i64..4_000_000_000_000, name in "[a-z]{1,8}") {
        let spec = ScheduleSpec { every: Some(Span::secs(every_s)), jitter: Some(Span::secs(jitter_s)), ..ScheduleSpec::default() };
        let schedule = spec.compile_for(&name).unwrap();
        let nominal = schedule.next_after(start).unwrap().unwrap();
        let due_ms = schedule.due_at(nominal).unwrap();
        let next = schedule.next_after(nominal).unwrap().unwrap();
        prop_assert!(nominal <= due_ms && due_ms < next && due_ms < nominal + jitter_s as i64 * 1_000);
        prop_assert_eq!(spec.compile_for(&name).unwrap().due_at(nominal).unwrap(), due_ms);
        // Not due a millisecond before, due then, under its own instant, and as punctual as without jitter.
        let before = due(&schedule, &MisfirePolicy::default(), nominal, due_ms - 1).unwrap();
        prop_assert_eq!(before.intents, vec![]);
        let skip = MisfirePolicy { policy: Misfire::Skip, grace: Span(0), limit: 1 };
        let then = due(&schedule, &skip, nominal, due_ms).unwrap();
        prop_assert_eq!(then.intents, vec![Intent::Fire { nominal_ms: nominal }]);
        prop_assert_eq!(then.next_fire_ms, Some(next));
    }

    /// With every rule at once: strictly after, within the bounds, and each instant decided exactly once however the passes fall.
    #[test]
    fn s_05_f2_rules_neither_lose_nor_double_an_instant(
        every_s in 30_u64..4_000, jitter_s in 0_u64..600, from_h in 0_i64..48, until_h in 48_i64..120,
        hours in 0_u32..23, wakes in prop::collection::vec(1_i64..40_000, 1..40),
    ) {
        let start = ms("2026-03-27T00:00:00Z");
        let at = |h: i64| rfc3339(start + h * 3_600_000);
        let spec = ScheduleSpec {
            every: Some(Span::secs(every_s)),
            from: Some(at(from_h)),
            until: Some(at(until_h)),
            timezone: Some("Europe/Berlin".into()),
            except: vec!["2026-03-28".into(), format!("cron: * {hours} * * *")],
            jitter: (jitter_s > 0).then(|| Span::secs(jitter_s)),
            ..ScheduleSpec::default()
        };
        let schedule = spec.compile_for("job").unwrap();
        let mut wanted = Vec::new();
        let mut instant = start - 1;
        while let Some(next) = schedule.next_after(instant).unwrap() {
            prop_assert!(next > instant && next >= start + from_h * 3_600_000 && next <= start + until_h * 3_600_000);
            wanted.push(next);
            instant = next;
        }
        let (mut next, mut now, mut decided) = (schedule.next_after(start - 1).unwrap(), start, Vec::new());
        for wake in wakes.into_iter().chain([200 * 3_600]) {
            now += wake * 1_000;
            if let Some(first) = next {
                let (intents, later) = passes(&schedule, &MisfirePolicy::default(), first, now);
                for intent in &intents {
                    let excepted = matches!(intent, Intent::Record { kind: DecisionKind::SkippedException, .. });
                    prop_assert_eq!(excepted, schedule.exception(intent.nominal_ms()).is_some());
                    prop_assert!(schedule.due_at(intent.nominal_ms()).unwrap() <= now);
                }
                decided.extend(intents.iter().map(Intent::nominal_ms));
                next = later;
            }
        }
        prop_assert_eq!(decided, wanted);
    }
}
