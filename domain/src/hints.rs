//! Probable mistakes in a job: what is allowed, and hardly ever meant. Few, and each with what to write instead.

use crate::job::{JobSpec, OverlapPolicy, Timeout};
use crate::schedule::{Coming, Schedule, ScheduleSpec, coming};
use crate::units::{Span, rfc3339};

/// A probable mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The key that it is about.
    pub key: &'static str,
    /// What will happen, and what to write if that is not meant.
    pub message: String,
}

/// Firings that are looked at for what a change of the clock does; two years of a daily job.
const LOOKED_AT: usize = 750;

const DAY_MS: i64 = 86_400_000;

/// The probable mistakes of a job, as seen from an instant. `is_set` says whether a key stands in the job file.
#[must_use]
pub fn hints(spec: &JobSpec, now_ms: i64, is_set: &dyn Fn(&str) -> bool) -> Vec<Hint> {
    let (Some(text), Ok(Some(schedule))) = (&spec.schedule, spec.compiled_schedule()) else { return Vec::new() };
    let mut found = Vec::new();
    let mut add = |key, message: Option<String>| found.extend(message.map(|message| Hint { key, message }));
    if let Some(pattern) = &text.cron {
        add("schedule.cron", of_fields(pattern));
        add("schedule.cron", of_days(pattern));
        add("schedule.cron", in_a_gap(text, &schedule, now_ms));
    }
    add("schedule.every", of_rate(text));
    add("schedule", of_end(text, &schedule, now_ms));
    let interval = shortest_interval(&schedule, now_ms);
    if is_set("timeout") {
        add("timeout", of_timeout(spec, interval));
    }
    if let (Some(jitter), Some(interval)) = (text.jitter, interval)
        && jitter.as_ms() > interval
    {
        let shortest = Span(interval.unsigned_abs());
        let message = format!(
            "jitter = \"{jitter}\" is longer than the {shortest} between two instants; it ends before the next instant"
        );
        add("schedule.jitter", Some(message));
    }
    found
}

/// Fields that look as if they were shifted by one, or a `*` where a `0` was meant.
fn of_fields(pattern: &str) -> Option<String> {
    let fields: Vec<&str> = pattern.split_whitespace().collect();
    let number = |text: &str| text.parse::<u32>().ok();
    let rest_of = |from: usize| fields[from..].join(" ");
    match fields[..] {
        ["*", hour, ..] if fields.len() == 5 && number(hour).is_some() => Some(format!(
            "`{pattern}` fires 60 times in a row, each minute of hour {hour}; `0 {}` fires once",
            rest_of(1)
        )),
        ["*", minute, ..] if fields.len() >= 6 && number(minute).is_some() => Some(format!(
            "`{pattern}` fires 60 times in a row, each second of minute {minute}; `0 {}` fires once",
            rest_of(1)
        )),
        [second, minute, "*", "*", "*", "*"]
            if number(second).is_some() && number(minute).is_some_and(|m| m < 24) && minute != "0" =>
        {
            Some(format!(
                "`{pattern}` has six fields, the first is the second: it fires each hour, {minute} min {second} s past; \
                 for {minute:0>2}:{second:0>2} each day write `{second} {minute} * * *`"
            ))
        }
        _ => None,
    }
}

/// Both day fields: one of them suffices, which surprises most.
fn of_days(pattern: &str) -> Option<String> {
    let fields: Vec<&str> = pattern.split_whitespace().collect();
    let (day, weekday) = match fields[..] {
        [_, _, day, _, weekday] | [_, _, _, day, _, weekday] | [_, _, _, day, _, weekday, _] => (day, weekday),
        _ => return None,
    };
    let free = |field: &str| field.starts_with(['*', '?', '+']);
    (!free(day) && !free(weekday)).then(|| {
        format!(
            "`{pattern}` names days of the month ({day}) and weekdays ({weekday}): it fires on each day that is either; \
             write +{weekday} for days that are both"
        )
    })
}

/// A fixed time that a change of the clock moves.
fn in_a_gap(text: &ScheduleSpec, schedule: &Schedule, now_ms: i64) -> Option<String> {
    if text.dst.is_some_and(|dst| dst.gap.is_some()) {
        return None;
    }
    let (list, _) = coming(schedule, now_ms, LOOKED_AT).ok()?;
    let (at, change) = list.into_iter().find_map(|coming| match coming {
        Coming::Fires { nominal_ms, clock_change: Some(change), .. } if change.contains("does not exist") => {
            Some((nominal_ms, change))
        }
        _ => None,
    })?;
    let zone = text.timezone.as_deref().unwrap_or("UTC");
    let day = &rfc3339(at)[..10];
    Some(format!("on {day} in {zone}, {change}; choose another time, or dst = {{ gap = \"skip\" }} to leave it out"))
}

/// A fixed rate whose times wander through the day.
fn of_rate(text: &ScheduleSpec) -> Option<String> {
    let every = text.every?;
    let wanders = every.as_ms() > 60_000 && every.as_ms() < DAY_MS && DAY_MS % every.as_ms() != 0;
    wanders.then(|| {
        let divisors = [2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 60, 90, 120, 180, 240, 360, 480, 720];
        let near = divisors.into_iter().min_by_key(|minutes| (minutes * 60_000 - every.as_ms()).abs()).unwrap_or(5);
        let near = Span::mins(near.unsigned_abs());
        format!("every = \"{every}\" does not divide a day, so that its times are others each day; \"{near}\" does")
    })
}

/// A schedule that never fires.
fn of_end(text: &ScheduleSpec, schedule: &Schedule, now_ms: i64) -> Option<String> {
    if schedule.delay_ms().is_some() {
        return None;
    }
    let (list, given_up) = coming(schedule, now_ms, 1).ok()?;
    if list.iter().any(|coming| matches!(coming, Coming::Fires { .. })) {
        return None;
    }
    let skipped = list.iter().find_map(|coming| match coming {
        Coming::Skipped { exception, .. } => Some(exception.clone()),
        Coming::Fires { .. } | Coming::Lost { .. } => None,
    });
    Some(match (skipped, &text.at, &text.until) {
        (Some(by), ..) if given_up => {
            format!("it does not fire for a very long time: every instant is excepted, the last by '{by}'")
        }
        (Some(by), ..) => format!("it never fires: every instant that is left is excepted, the first by '{by}'"),
        (None, Some(at), _) => format!("at = \"{at}\" is in the past; it never fires"),
        (None, None, Some(until)) => format!("nothing is due before until = \"{until}\"; it never fires"),
        (None, None, None) => "there is no such day, such as 30 February; it never fires".into(),
    })
}

/// An attempt that may take longer than the time to the next instant, which is skipped then.
fn of_timeout(spec: &JobSpec, interval: Option<i64>) -> Option<String> {
    let (Timeout::After(timeout), OverlapPolicy::Skip, Some(interval)) = (spec.timeout, spec.overlap, interval) else {
        return None;
    };
    (timeout.as_ms() > interval).then(|| {
        format!(
            "an attempt may take {timeout}, but the next instant can come after {}, and overlap = \"skip\" lets it go while the job runs",
            Span(interval.unsigned_abs())
        )
    })
}

/// The shortest time between two of the next few instants.
fn shortest_interval(schedule: &Schedule, now_ms: i64) -> Option<i64> {
    let (mut at, mut shortest) = (schedule.next_after(now_ms).ok()??, None::<i64>);
    for _ in 0..100 {
        let Ok(Some(next)) = schedule.next_after(at) else { break };
        shortest = Some(shortest.map_or(next - at, |s| s.min(next - at)));
        at = next;
    }
    shortest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::parse_instant;

    fn of(job: &str) -> Vec<String> {
        let text = format!("[job.a]\nhandler = {{ rust = \"noop\" }}\n{job}\n");
        let spec = crate::jobfile::parse(&text).unwrap_or_else(|e| panic!("{job}: {e}")).remove(0);
        let now = parse_instant("2026-11-30T12:00:00Z").unwrap();
        hints(&spec, now, &|key| job.contains(key)).into_iter().map(|h| format!("{}: {}", h.key, h.message)).collect()
    }

    fn of_cron(pattern: &str) -> Vec<String> {
        of(&format!("schedule = {{ cron = \"{pattern}\" }}"))
    }

    #[test]
    fn i_09_a_star_for_the_minute_fires_sixty_times() {
        let hints = of_cron("* 3 * * *");
        assert_eq!(hints.len(), 1, "{hints:?}");
        assert!(hints[0].contains("fires 60 times") && hints[0].contains("`0 3 * * *` fires once"), "{hints:?}");
        assert!(of_cron("* 30 2 * * *")[0].contains("`0 30 2 * * *` fires once"));
    }

    #[test]
    fn probable_mistakes_and_what_to_write_instead() {
        for (job, words) in [
            ("schedule = { cron = \"0 0 13 * 5\" }", "+5"),
            ("schedule = { cron = \"0 0 30 2 *\" }", "never fires"),
            (
                "schedule = { cron = \"30 2 * * *\", timezone = \"America/New_York\" }",
                "on 2027-03-14 in America/New_York",
            ),
            ("schedule = { cron = \"30 2 * * * *\" }", "for 02:30 each day write `30 2 * * *`"),
            ("schedule = { every = \"7m\" }", "\"6m\" does"),
            ("schedule = { at = \"2026-01-01T00:00:00Z\" }", "in the past"),
            ("schedule = { every = \"1h\", until = \"2026-01-01T00:00:00Z\" }", "never fires"),
            ("schedule = { cron = \"0 9 * * 6\", except = [\"cron: * * * * 6,0\"] }", "every instant"),
            ("schedule = { every = \"1m\", jitter = \"5m\" }", "longer than the 1m"),
            ("schedule = { every = \"5m\" }\ntimeout = \"10m\"", "may take 10m"),
        ] {
            let hints = of(job);
            assert!(hints.len() == 1 && hints[0].contains(words), "{job}: {hints:?}");
        }
    }

    #[test]
    fn what_is_meant_gets_no_hint() {
        for job in [
            "schedule = { cron = \"0 3 * * *\" }",
            "schedule = { cron = \"* * * * *\" }",
            "schedule = { cron = \"*/5 3 * * *\" }",
            "schedule = { cron = \"* 3-5 * * *\" }",
            "schedule = { cron = \"0 30 2 * * *\" }",
            "schedule = { cron = \"0 0 * * * *\" }",
            "schedule = { cron = \"0 0 13 * +5\" }",
            "schedule = { cron = \"@daily\" }",
            "schedule = { cron = \"30 2 * * *\", timezone = \"America/New_York\", dst = { gap = \"skip\" } }",
            "schedule = { cron = \"30 2 * * *\", timezone = \"Asia/Tokyo\" }",
            "schedule = { every = \"15m\" }",
            "schedule = { every = \"45s\" }",
            "schedule = { every = \"5m\" }",
            "schedule = { every = \"5m\" }\ntimeout = \"10m\"\noverlap = \"allow\"",
            "schedule = { delay = \"10m\" }\ntimeout = \"30m\"",
            "schedule = { cron = \"0 9 * * *\", except = [\"cron: * * * * 6,0\"] }",
        ] {
            assert_eq!(of(job), Vec::<String>::new(), "{job}");
        }
    }
}
