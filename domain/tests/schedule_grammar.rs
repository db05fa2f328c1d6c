//! The grammar of cron patterns: what is refused and in which words, and that croner, an independent reader and walker of the
//! same grammar, finds the same instants in UTC.

#![allow(clippy::unwrap_used)]

use chrono::DateTime;
use shardcron_domain::schedule::{DstSpec, Fold, Gap, Schedule, ScheduleSpec};
use shardcron_domain::units::{Span, parse_instant, rfc3339};
use std::time::{Duration, Instant};

mod support;
use support::Random;

fn compile(pattern: &str) -> Result<Schedule, String> {
    ScheduleSpec { cron: Some(pattern.into()), ..ScheduleSpec::default() }.compile().map_err(|e| e.to_string())
}

#[test]
fn what_is_refused_says_what_would_be_right() {
    for (pattern, words) in [
        ("", "it is empty"),
        ("* * * *", "4 fields"),
        ("* * * * * * * *", "8 fields; there are 5"),
        ("0 12 * * *\n0 13 * * *", "two lines"),
        ("61 * * * *", "minutes: 61 is not from 0 to 59"),
        ("0 24 * * *", "midnight is 0"),
        ("0 0 * * 8", "0 and 7 are Sunday, 1 is Monday"),
        ("0/10 * * * *", "write 0-59/10 or */10"),
        ("/10 * * * *", "write 0-59/10 or */10"),
        ("0 0 * * 1/2", "write 1-6/2"),
        ("0 22-2 * * *", "write 22-23,0-2"),
        ("0 23-2 * * *", "write 23,0-2"),
        ("0 0 * * FRI-MON", "write FRI-SAT,SUN-MON"),
        ("0 0 * * 6-1", "write 6,0-1"),
        ("0 0 * * 7-2", "write 0-2"),
        ("0 0 * nov-FEB *", "write nov-DEC,JAN-FEB"),
        ("0 0 * * 5-0", "runs backwards"),
        ("0 0 * * MOM", "did you mean MON?"),
        ("0 0 * * MONDAY", "did you mean MON?"),
        ("0 0 * JUNE *", "did you mean JUN?"),
        ("MON 0 * * *", "minutes: 'MON' is not known"),
        ("0 0 L-3 * *", "there are L and LW"),
        ("0 0 * * L", "5L, the last Friday"),
        ("0 0 * * 5#6", "1 to 5 or L"),
        ("0 0 * * 1-5#2", "1#2,3#2"),
        ("0 0 W * *", "15W"),
        ("0 0 32W * *", "32 is not from 1 to 31"),
        ("1,,2 * * * *", "comma"),
        ("*,5 * * * *", "already means all"),
        ("*/0 * * * *", "the least is 1"),
        ("*/90 * * * *", "every = \"90m\""),
        ("*/ * * * *", "no number after its '/'"),
        ("+5 * * * *", "'+5' is not known"),
        ("? * * * *", "two day fields only"),
        ("H 2 * * *", "Jenkins"),
        ("0 0 0 1 1 * 1969", "1970 to 9999"),
        ("0 0 0 1 1 * 10000", "1970 to 9999"),
        ("@dayly", "did you mean @daily?"),
        ("@reboot", "cluster"),
        ("@every 5m", "every = \"5m\""),
        ("@fortnightly", "there are @yearly"),
        ("CRON_TZ=Asia/Tokyo 0 0 * * *", "timezone = \"Asia/Tokyo\""),
    ] {
        let message = compile(pattern).expect_err(pattern);
        assert!(message.contains(words), "{pattern}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
    assert!(compile(&"0,".repeat(2_000)).unwrap_err().contains("characters"));
}

#[test]
fn any_text_is_read_or_refused_without_a_panic() {
    let mut random = Random::from_env();
    let alphabet: Vec<char> = "0123456789*/-,#?LW+@ \tMONJANé٥\u{0}".chars().collect();
    for _ in 0..20_000 {
        let text: String = (0..random.below(24)).map(|_| *random.pick(&alphabet)).collect();
        if let Ok(schedule) = compile(&text) {
            let _ = schedule.next_after(0).unwrap();
        }
    }
}

#[test]
fn a_zone_that_is_not_one_gets_a_suggestion() {
    for (zone, words) in [
        ("Mars/Phobos", "write one such as"),
        ("Europe/Berln", "did you mean Europe/Berlin?"),
        ("america/new york", "did you mean America/New_York?"),
        ("Tokyo", "did you mean Asia/Tokyo?"),
        ("+02:00", "is an offset"),
        ("UTC+2", "is an offset"),
        ("", "write one such as"),
    ] {
        let spec = ScheduleSpec { cron: Some("@daily".into()), timezone: Some(zone.into()), ..ScheduleSpec::default() };
        let message = spec.compile().unwrap_err().to_string();
        assert!(message.contains(words), "{zone}: {message}");
    }
}

#[test]
fn keys_that_do_not_go_together_are_refused() {
    let none = ScheduleSpec::default;
    let every = Some(Span::mins(5));
    for (spec, words) in [
        (none(), "exactly one"),
        (ScheduleSpec { cron: Some("@daily".into()), every, ..none() }, "exactly one"),
        (ScheduleSpec { cron: Some("@daily".into()), anchor: Some("2026-01-01T00:00:00Z".into()), ..none() }, "anchor"),
        (ScheduleSpec { every, dst: Some(DstSpec::default()), ..none() }, "dst"),
        (ScheduleSpec { every: Some(Span(0)), ..none() }, "without end"),
        (ScheduleSpec { every, anchor: Some("08:10".into()), ..none() }, "2026-12-25T08:00:00Z"),
        (ScheduleSpec { every, timezone: Some("Mars/Phobos".into()), ..none() }, "Mars/Phobos"),
    ] {
        let message = spec.compile().unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn dst_can_be_set_for_each_job() {
    let fires = |pattern: &str, gap, fold, from: &str, count| -> Vec<String> {
        let spec = ScheduleSpec {
            cron: Some(pattern.into()),
            timezone: Some("America/New_York".into()),
            dst: Some(DstSpec { gap, fold }),
            ..ScheduleSpec::default()
        };
        let schedule = spec.compile().unwrap();
        let mut instant = parse_instant(from).unwrap();
        let mut next = || {
            instant = schedule.next_after(instant).unwrap()?;
            Some(rfc3339(instant))
        };
        (0..count).map_while(|_| next()).collect()
    };
    let spring = "2025-03-08T12:00:00Z";
    assert_eq!(fires("30 2 * * *", Some(Gap::Skip), None, spring, 1), ["2025-03-10T06:30:00Z"]);
    assert_eq!(fires("*/30 2 * * *", None, None, spring, 1), ["2025-03-10T06:00:00Z"]);
    assert_eq!(
        fires("*/30 2 * * *", Some(Gap::After), None, spring, 2),
        ["2025-03-09T07:00:00Z", "2025-03-10T06:00:00Z"]
    );
    let autumn = "2025-11-01T12:00:00Z";
    let passes = ["2025-11-02T05:30:00Z", "2025-11-02T06:30:00Z", "2025-11-03T06:30:00Z"];
    assert_eq!(fires("30 1 * * *", None, None, autumn, 2), [passes[0], passes[2]]);
    assert_eq!(fires("30 1 * * *", None, Some(Fold::Second), autumn, 2), [passes[1], passes[2]]);
    assert_eq!(fires("30 1 * * *", None, Some(Fold::Both), autumn, 3), passes);
    let minutes = fires("*/30 1 * * *", None, Some(Fold::First), autumn, 3);
    assert_eq!(minutes, ["2025-11-02T05:00:00Z", "2025-11-02T05:30:00Z", "2025-11-03T06:00:00Z"]);
    let within_first = fires("*/30 1 * * *", None, Some(Fold::Second), "2025-11-02T05:40:00Z", 2);
    assert_eq!(within_first, ["2025-11-02T06:00:00Z", "2025-11-02T06:30:00Z"]);
    let text = r#"{"cron":"@daily","dst":{"gap":"skip","fold":"both"}}"#;
    let spec: ScheduleSpec = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&spec).unwrap(), text);
}

#[test]
fn impossible_dates_are_never_and_soon_seen_to_be() {
    for pattern in ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "0 0 0 29 2 * 2027", "0 0 30W 2 *", "0 0 8-31 * +1#1"] {
        let start = Instant::now();
        assert_eq!(compile(pattern).unwrap().next_after(0), Ok(None), "{pattern}");
        assert!(start.elapsed() < Duration::from_millis(100), "{pattern}: {:?}", start.elapsed());
    }
}

#[test]
fn the_ends_of_time_are_no_trouble() {
    let schedule = compile("0 0 1 1 *").unwrap();
    assert_eq!(schedule.next_after(i64::MIN), Ok(Some(0)));
    assert_eq!(schedule.next_after(i64::MAX), Ok(None));
    let last = parse_instant("9999-01-01T00:00:00Z").unwrap();
    assert_eq!(schedule.next_after(last - 1), Ok(Some(last)));
    assert_eq!(schedule.next_after(last), Ok(None));
    for zone in ["Pacific/Kiritimati", "Pacific/Pago_Pago"] {
        let spec = ScheduleSpec {
            cron: Some("59 59 23 31 12 * 9999".into()),
            timezone: Some(zone.into()),
            ..ScheduleSpec::default()
        };
        let found = spec.compile().unwrap().next_after(0).unwrap();
        assert!(found.is_some(), "{zone}");
    }
    let every = ScheduleSpec { every: Some(Span::secs(1)), ..ScheduleSpec::default() }.compile().unwrap();
    assert_eq!(every.next_after(i64::MAX), Ok(None));
    assert_eq!(every.next_after(i64::MIN).unwrap().map(|i| i.rem_euclid(1_000)), Some(0));
}

#[test]
fn croner_finds_the_same_instants_in_utc() {
    let mut random = Random::from_env();
    let parser = croner::parser::CronParser::builder()
        .seconds(croner::parser::Seconds::Optional)
        .year(croner::parser::Year::Optional)
        .build();
    let mut compared = 0;
    for _ in 0..3_000 {
        let pattern = support::pattern(&mut random);
        let parts: Vec<&str> = pattern.split(' ').collect();
        let (day, weekday) = (parts[parts.len() - 3], parts[parts.len() - 1]);
        // Where both day fields are restricted and one begins with '*', croner ORs and we follow cronie.
        if day != "*" && weekday != "*" && (day.starts_with('*') || weekday.starts_with('*')) {
            continue;
        }
        let ours = compile(&pattern).unwrap_or_else(|e| panic!("{pattern}: {e}"));
        let theirs = parser.parse(&pattern).unwrap_or_else(|e| panic!("{pattern}: {e}"));
        let mut instant = random.between(0, 4_000_000_000) * 1_000;
        for _ in 0..6 {
            let at = DateTime::from_timestamp_millis(instant).unwrap();
            let wanted = match theirs.find_next_occurrence(&at, false) {
                Ok(t) => Some(t.timestamp_millis()),
                Err(croner::errors::CronError::TimeSearchLimitExceeded) => None,
                Err(e) => panic!("{pattern}: {e}"),
            };
            let got = ours.next_after(instant).unwrap();
            // croner ends at the year 5000.
            let got_in_reach = got.filter(|t| *t < 95_617_584_000_000);
            assert_eq!(got_in_reach.map(rfc3339), wanted.map(rfc3339), "{pattern} after {at}; {random}");
            compared += 1;
            match wanted {
                Some(next) => instant = next,
                None => break,
            }
        }
    }
    println!("{compared} instants agree with croner's");
}
