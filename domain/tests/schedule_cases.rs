//! The shared cases of schedules, by their ids: all of `cases/cron.json`, and the S cases that a schedule alone decides.

#![allow(clippy::unwrap_used)]

use serde::Deserialize;
use shardcron_domain::firing::{Intent, due};
use shardcron_domain::job::{Misfire, MisfirePolicy};
use shardcron_domain::schedule::{Schedule, ScheduleSpec};
use shardcron_domain::units::{Span, parse_instant, rfc3339};
use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

/// Cases where an outcome under `alt` is taken instead of the first one. Whoever adds to it documents it in `schedule/mod.rs`.
const ALTERNATIVES_TAKEN: [&str; 0] = [];

#[derive(Deserialize)]
struct Case {
    id: String,
    expr: String,
    tz: String,
    from: String,
    expect: Outcome,
    alt: Vec<Outcome>,
    #[serde(default)]
    exhaustive: bool,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Outcome {
    Refused(String),
    Instants(Vec<String>),
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("cases/cron.json")).unwrap()
}

fn cron(pattern: &str, zone: &str) -> Schedule {
    let spec = ScheduleSpec { cron: Some(pattern.into()), timezone: Some(zone.into()), ..ScheduleSpec::default() };
    spec.compile().unwrap()
}

fn every(span: Span, anchor: &str) -> Schedule {
    let spec = ScheduleSpec { every: Some(span), anchor: Some(anchor.into()), ..ScheduleSpec::default() };
    spec.compile().unwrap()
}

fn at(text: &str, zone: Option<&str>) -> Result<String, String> {
    let spec = ScheduleSpec { at: Some(text.into()), timezone: zone.map(str::to_string), ..ScheduleSpec::default() };
    let schedule = spec.compile().map_err(|e| e.to_string())?;
    Ok(rfc3339(schedule.next_after(i64::MIN).unwrap().unwrap()))
}

fn ms(text: &str) -> i64 {
    parse_instant(text).unwrap()
}

/// All instants of a schedule from one instant (excluded) to another (included).
fn fires(schedule: &Schedule, from: &str, to: &str) -> Vec<String> {
    let (mut instant, end) = (ms(from), ms(to));
    let mut found = Vec::new();
    while let Some(next) = schedule.next_after(instant).unwrap().filter(|n| *n <= end) {
        assert!(next > instant);
        found.push(rfc3339(next));
        instant = next;
    }
    found
}

/// What comes out of a case, as far as the given outcome reaches.
fn outcome(case: &Case, count: usize) -> Outcome {
    let spec =
        ScheduleSpec { cron: Some(case.expr.clone()), timezone: Some(case.tz.clone()), ..ScheduleSpec::default() };
    let Ok(schedule) = spec.compile() else { return Outcome::Refused("error".into()) };
    let mut instant = ms(&case.from);
    let mut found = Vec::new();
    while found.len() < count {
        let Some(next) = schedule.next_after(instant).unwrap() else { break };
        found.push(rfc3339(next));
        instant = next;
    }
    Outcome::Instants(found)
}

fn meets(case: &Case, wanted: &Outcome) -> bool {
    let count = match wanted {
        Outcome::Refused(_) => 1,
        Outcome::Instants(list) => list.len() + usize::from(case.exhaustive),
    };
    outcome(case, count) == *wanted
}

#[test]
fn cron_json_every_case() {
    let all = cases();
    let (mut failed, mut by_alternative) = (Vec::new(), Vec::new());
    for case in &all {
        let start = Instant::now();
        if !meets(case, &case.expect) {
            if case.alt.iter().any(|alt| meets(case, alt)) {
                by_alternative.push(case.id.as_str());
            } else {
                println!(
                    "{}: {} {}: wanted {:?}, got {:?}",
                    case.id,
                    case.expr,
                    case.tz,
                    case.expect,
                    outcome(case, 10)
                );
                failed.push(case.id.as_str());
            }
        }
        assert!(start.elapsed() < Duration::from_millis(100), "{} took {:?}", case.id, start.elapsed());
    }
    println!("{} cases; by an alternative: {by_alternative:?}", all.len());
    assert_eq!(all.len(), 109, "the file was cut");
    assert!(failed.is_empty(), "failed: {failed:?}");
    assert_eq!(by_alternative, ALTERNATIVES_TAKEN);
}

#[test]
fn s_02_midnight_on_the_london_spring_day_fires_once() {
    let found = fires(&cron("0 0 * * *", "Europe/London"), "2025-03-29T12:00:00Z", "2025-03-31T12:00:00Z");
    assert_eq!(found, ["2025-03-30T00:00:00Z", "2025-03-30T23:00:00Z"]);
}

#[test]
fn s_03_wildcards_go_on_through_the_repeated_hour() {
    let schedule = cron("*/15 * * * * *", "Europe/Berlin");
    let found = fires(&schedule, "2025-10-26T00:30:00Z", "2025-10-26T02:00:00Z");
    assert_eq!(found.len(), 360);
    let instants: Vec<i64> = found.iter().map(|t| ms(t)).collect();
    assert!(instants.windows(2).all(|w| w[1] - w[0] == 15_000));
}

#[test]
fn s_04_fixed_times_fire_once_in_the_repeated_hour_also_in_lists() {
    let zone = "America/New_York";
    let (from, to) = ("2025-11-02T04:00:00Z", "2025-11-04T04:00:00Z");
    assert_eq!(fires(&cron("30 1 * * *", zone), from, to), ["2025-11-02T05:30:00Z", "2025-11-03T06:30:00Z"]);
    assert_eq!(
        fires(&cron("30 1,13 * * *", zone), from, to),
        ["2025-11-02T05:30:00Z", "2025-11-02T18:30:00Z", "2025-11-03T06:30:00Z", "2025-11-03T18:30:00Z"]
    );
    for between_the_passes in ["2025-11-02T06:00:00Z", "2025-11-02T06:10:00Z", "2025-11-02T06:59:59Z"] {
        assert_eq!(fires(&cron("30 1 * * *", zone), between_the_passes, to), ["2025-11-03T06:30:00Z"]);
    }
}

#[test]
fn s_07_weekdays_are_those_of_posix() {
    let found = fires(&cron("0 7 * * 1-5", "Asia/Taipei"), "2026-05-09T12:00:00Z", "2026-05-23T12:00:00Z");
    let days: Vec<&str> = found.iter().map(|t| &t[8..10]).collect();
    assert_eq!(days, ["10", "11", "12", "13", "14", "17", "18", "19", "20", "21"]);
    for (pattern, first) in [
        ("0 16 * * 0", "2026-05-10T16:00:00Z"),
        ("0 0 * * 7", "2026-05-10T00:00:00Z"),
        ("@weekly", "2026-05-10T00:00:00Z"),
        ("@WEEKLY", "2026-05-10T00:00:00Z"),
    ] {
        let found = fires(&cron(pattern, "UTC"), "2026-05-09T12:00:00Z", "2026-05-23T12:00:00Z");
        assert_eq!((found.len(), found[0].as_str()), (2, first), "{pattern}");
    }
}

/// Not a case by itself: the child process of `s_12`.
#[test]
fn s_12_child_prints_every_outcome() {
    for case in cases() {
        println!("came-out {} {:?}", case.id, outcome(&case, 12));
    }
    println!("came-out S-13 {:?}", at("2026-12-25T08:00:00", Some("America/New_York")));
    println!(
        "came-out S-15 {:?}",
        every(Span::mins(60), "2026-01-01T08:10:00Z").next_after(ms("2026-01-01T09:30:00Z"))
    );
}

#[test]
fn s_12_the_zone_of_the_host_changes_nothing() {
    let run = |zone: Option<&str>| -> Vec<String> {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "s_12_child_prints_every_outcome", "--nocapture"]).env_remove("TZ");
        if let Some(zone) = zone {
            child.env("TZ", zone).env("TZDIR", "/nonexistent");
        }
        let out = child.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = String::from_utf8(out.stdout).unwrap();
        // The harness may put its own words before the first line.
        text.lines().filter_map(|l| l.find("came-out ").map(|i| l[i..].to_string())).collect()
    };
    let plain = run(None);
    assert_eq!(plain.len(), cases().len() + 2);
    for zone in ["Australia/Sydney", "America/St_Johns", "Nonsense/Nowhere"] {
        assert_eq!(run(Some(zone)), plain, "TZ={zone}");
    }
}

#[test]
fn s_13_a_local_one_shot_uses_the_offset_of_its_own_date() {
    for text in ["2026-12-25T08:00:00", "2026-12-25T08:00", "2026-12-25 08:00"] {
        assert_eq!(at(text, Some("America/New_York")), Ok("2026-12-25T13:00:00Z".into()), "{text}");
    }
    assert_eq!(at("2026-07-25T08:00:00", Some("America/New_York")), Ok("2026-07-25T12:00:00Z".into()));
}

#[test]
fn s_14_one_shots_that_are_past_missing_or_ambiguous() {
    let past = ScheduleSpec { at: Some("2020-01-01T00:00:00Z".into()), ..ScheduleSpec::default() }.compile().unwrap();
    assert_eq!(past.next_after(ms("2026-07-01T00:00:00Z")), Ok(None), "(a) not due; the API refuses it");
    let missing = at("2026-03-08T02:30", Some("America/New_York")).unwrap_err();
    assert!(
        missing.contains("does not exist") && missing.contains("02:00:00") && missing.contains("03:00:00"),
        "{missing}"
    );
    assert_eq!(at("2026-11-01T01:30", Some("America/New_York")), Ok("2026-11-01T05:30:00Z".into()), "(c)");
    assert_eq!(at("2026-04-05T01:45", Some("Australia/Lord_Howe")), Ok("2026-04-04T14:45:00Z".into()), "(d)");
    assert!(at("2026-02-30T00:00", Some("UTC")).is_err(), "(e)");
    assert!(at("2026-03-23", Some("Asia/Shanghai")).is_err(), "(f)");
    assert!(at("2026-03-23T08:00:00", None).unwrap_err().contains("has no zone"));
    assert_eq!(at("2026-11-01T01:30:00-05:00", Some("America/New_York")), Ok("2026-11-01T06:30:00Z".into()));
}

#[test]
fn s_15_a_fixed_rate_keeps_its_anchor() {
    for (anchor, zone) in [("2026-01-01T08:10:00Z", None), ("2026-01-01T09:10:00", Some("Europe/Berlin"))] {
        let spec = ScheduleSpec {
            every: Some(Span::mins(60)),
            anchor: Some(anchor.into()),
            timezone: zone.map(str::to_string),
            ..ScheduleSpec::default()
        };
        let schedule = spec.compile().unwrap();
        assert_eq!(schedule.next_after(ms("2026-01-01T09:30:00Z")), Ok(Some(ms("2026-01-01T10:10:00Z"))));
        let skip = MisfirePolicy { policy: Misfire::Skip, ..MisfirePolicy::default() };
        let back = due(&schedule, &skip, ms("2026-01-01T09:10:00Z"), ms("2026-01-01T10:30:00Z")).unwrap();
        assert!(back.intents.iter().all(|i| matches!(i, Intent::Record { .. })));
        assert_eq!(back.next_fire_ms, Some(ms("2026-01-01T11:10:00Z")));
    }
}

#[test]
fn s_16_a_long_interval_outlives_restarts() {
    let day = 86_400_000;
    let t0 = ms("2026-01-01T00:00:00Z");
    let mut next = t0 + 7 * day;
    let mut fired = Vec::new();
    for restart in 1..=20 {
        // Each day a new process, which knows only the ledger's next instant.
        let schedule = every(Span(7 * day as u64), &rfc3339(t0));
        for wake in [t0 + restart * day, t0 + restart * day + 5_000] {
            let looked = due(&schedule, &MisfirePolicy::default(), next, wake).unwrap();
            fired.extend(looked.intents.iter().map(Intent::nominal_ms));
            next = looked.next_fire_ms.unwrap();
        }
    }
    assert_eq!(fired, [t0 + 7 * day, t0 + 14 * day]);
}

#[test]
fn s_19_a_timer_that_wakes_early_or_late_never_doubles_an_instant() {
    let schedule = cron("* * * * * *", "UTC");
    let start = ms("2026-01-01T00:00:00Z");
    let mut next = schedule.next_after(start).unwrap().unwrap();
    let mut seen = BTreeSet::new();
    let mut random = 0x5_eed_u64;
    let mut now = start;
    while seen.len() < 10_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // From 20 ms early to 400 ms late, but a clock that never goes back.
        now = now.max(next - 20 + (random >> 33) as i64 % 421);
        let looked = due(&schedule, &MisfirePolicy::default(), next, now).unwrap();
        for intent in &looked.intents {
            assert!(intent.nominal_ms() <= now, "before its instant");
            assert!(seen.insert(intent.nominal_ms()), "twice");
        }
        next = looked.next_fire_ms.unwrap();
    }
    let last = start + 10_000_000;
    assert_eq!((seen.first(), seen.last()), (Some(&(start + 1_000)), Some(&last)));
}

/// A measurement, for `cargo test --release -- --ignored --nocapture cost`: a leader asks once for each firing, and for every
/// job when it takes over.
#[test]
#[ignore = "a measurement"]
fn cost_of_next_after() {
    let start = ms("2026-01-01T00:00:00Z");
    for (pattern, zone) in [
        ("* * * * *", "UTC"),
        ("*/15 * * * * *", "Europe/Berlin"),
        ("30 2 * * *", "America/New_York"),
        ("30 1,13 * * 1-5", "America/New_York"),
        ("0 0 L * *", "Asia/Tokyo"),
        ("0 9 * * FRI#5", "Europe/London"),
        ("0 0 29 2 *", "UTC"),
        ("0 0 30 2 *", "UTC"),
    ] {
        let schedule = cron(pattern, zone);
        let (begin, mut instant) = (Instant::now(), start);
        let calls = 200_000;
        for _ in 0..calls {
            instant = schedule.next_after(instant).unwrap().unwrap_or(start);
        }
        println!("{:>5} ns  {pattern}  {zone}", begin.elapsed().as_nanos() / calls);
    }
    let begin = Instant::now();
    let jobs = 100_000;
    let held: Vec<Schedule> =
        (0..jobs).map(|n| cron(&format!("{} {} * * *", n % 60, n / 60 % 24), "Europe/Berlin")).collect();
    let read = begin.elapsed();
    let due: usize = held.iter().filter(|s| s.next_after(start).unwrap().is_some()).count();
    println!("{due} jobs read in {read:?}, asked in {:?}", begin.elapsed() - read);
}
