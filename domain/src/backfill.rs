//! Running past instants of a schedule, under their own fire keys.

use crate::firing::{again_key, schedule_key};
use crate::limits::{BACKFILL_INSTANTS, BACKFILL_INSTANTS_DEFAULT};
use crate::schedule::Schedule;
use crate::units::{parse_instant, rfc3339};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What a person asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackfillRequest {
    /// The first instant that may be meant, in RFC 3339 with its zone.
    pub from: String,
    /// The first one beyond.
    pub to: String,
    /// Instants that ran are run again, under a fire key of their own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// How many instants the range may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<usize>,
}

/// A range that was read and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first instant that may be meant.
    pub from_ms: i64,
    /// The first one beyond.
    pub to_ms: i64,
    /// How many instants it may have.
    pub max: usize,
}

impl BackfillRequest {
    /// Reads the range; what of it lies in the future is cut off, since the schedule will fire it.
    ///
    /// # Errors
    /// A sentence.
    pub fn range(&self, now_ms: i64) -> Result<Range, String> {
        let from_ms = parse_instant(&self.from).map_err(|e| format!("backfill.from: {e}"))?;
        let to_ms = parse_instant(&self.to).map_err(|e| format!("backfill.to: {e}"))?;
        let max = self.max.unwrap_or(BACKFILL_INSTANTS_DEFAULT);
        if max == 0 || max > BACKFILL_INSTANTS {
            return Err(format!("backfill.max: {max} is not from 1 to {BACKFILL_INSTANTS}"));
        }
        if to_ms <= from_ms {
            return Err(format!(
                "backfill: from {} to {} has no instant in it; 'to' is not included",
                self.from, self.to
            ));
        }
        if from_ms > now_ms {
            return Err(format!("backfill.from: {} is in the future; a backfill runs past instants", self.from));
        }
        Ok(Range { from_ms, to_ms: to_ms.min(now_ms.saturating_add(1)), max })
    }
}

/// The instants of a schedule in a range, oldest first.
///
/// # Errors
/// More than the range may have, or a schedule that can't be computed: a sentence.
pub fn instants(schedule: &Schedule, range: Range) -> Result<Vec<i64>, String> {
    if schedule.delay_ms().is_some() {
        return Err(
            "a fixed delay has no instants that can be named before they come; trigger the job with \"at\" instead"
                .into(),
        );
    }
    let mut found = Vec::new();
    let mut at = range.from_ms.saturating_sub(1);
    let mut walked = 0_usize;
    while let Some(next) = schedule.next_after(at).map_err(|e| e.to_string())?.filter(|next| *next < range.to_ms) {
        walked += 1;
        if found.len() >= range.max || walked > 10 * BACKFILL_INSTANTS {
            return Err(format!(
                "from {} to {} there are more than {} instants; take a shorter range, or raise the bound with max (up to {BACKFILL_INSTANTS})",
                rfc3339(range.from_ms),
                rfc3339(range.to_ms),
                range.max
            ));
        }
        at = next;
        // The exceptions hold for the past, too.
        if !schedule.is_excepted(next) {
            found.push(next);
        }
    }
    Ok(found)
}

/// What a backfill will run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Fire keys and instants, oldest first.
    pub run: Vec<(String, i64)>,
    /// Instants that ran and are left alone.
    pub already: Vec<i64>,
}

/// Of the instants of a range, what is run: those whose fire key has no execution, and with `force` the others, too, under
/// `<instant>/again:<request>`, so that the first run's identity stays its own.
#[must_use]
pub fn plan(instants: &[i64], ran: &BTreeSet<String>, force: bool, request_id: &str) -> Plan {
    let mut plan = Plan { run: Vec::new(), already: Vec::new() };
    for &instant in instants {
        let key = schedule_key(instant);
        match (ran.contains(&key), force) {
            (false, _) => plan.run.push((key, instant)),
            (true, true) => plan.run.push((again_key(instant, request_id), instant)),
            (true, false) => plan.already.push(instant),
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{FIRE_KEY_BYTES, REQUEST_ID_BYTES};
    use crate::schedule::ScheduleSpec;

    fn request(from: &str, to: &str) -> BackfillRequest {
        BackfillRequest { from: from.into(), to: to.into(), force: false, max: None }
    }

    const NOW: &str = "2026-03-10T00:00:00Z";

    fn found(cron: &str, zone: &str, request: &BackfillRequest) -> Result<Vec<String>, String> {
        let spec = ScheduleSpec { cron: Some(cron.into()), timezone: Some(zone.into()), ..ScheduleSpec::default() };
        let range = request.range(parse_instant(NOW).unwrap())?;
        instants(&spec.compile().unwrap(), range).map(|all| all.into_iter().map(rfc3339).collect())
    }

    #[test]
    fn from_is_included_and_to_is_not() {
        let days = found("0 0 * * *", "UTC", &request("2026-03-01T00:00:00Z", "2026-03-04T00:00:00Z")).unwrap();
        assert_eq!(days, ["2026-03-01T00:00:00Z", "2026-03-02T00:00:00Z", "2026-03-03T00:00:00Z"]);
        let till_now = found("0 0 * * *", "UTC", &request("2026-03-09T00:00:00Z", "2027-01-01T00:00:00Z")).unwrap();
        assert_eq!(till_now, ["2026-03-09T00:00:00Z", NOW], "the future is the schedule's");
    }

    #[test]
    fn m_10_a_gap_has_the_instant_that_the_schedule_has() {
        let spring = request("2026-03-08T00:00:00-05:00", "2026-03-09T00:00:00-04:00");
        assert_eq!(found("30 2 * * *", "America/New_York", &spring).unwrap(), ["2026-03-08T07:00:00Z"]);
    }

    #[test]
    fn what_can_not_be_is_said() {
        for (from, to, words) in [
            ("2026-03-01", NOW, "backfill.from"),
            ("2026-03-01T00:00", NOW, "with its zone"),
            (NOW, "2026-03-01T00:00:00Z", "no instant"),
            ("2026-04-01T00:00:00Z", "2026-05-01T00:00:00Z", "in the future"),
            ("2020-01-01T00:00:00Z", NOW, "more than 1000 instants"),
        ] {
            let sentence = found("0 0 * * *", "UTC", &request(from, to)).unwrap_err();
            assert!(sentence.contains(words), "{sentence}");
        }
        let zero = BackfillRequest { max: Some(0), ..request("2026-03-01T00:00:00Z", NOW) };
        assert!(found("0 0 * * *", "UTC", &zero).unwrap_err().contains("backfill.max"));
    }

    #[test]
    fn what_ran_is_left_alone_or_run_under_another_key() {
        let (a, b) = (parse_instant("2026-03-01T00:00:00Z").unwrap(), parse_instant("2026-03-02T00:00:00Z").unwrap());
        let ran = BTreeSet::from([schedule_key(a)]);
        assert_eq!(plan(&[a, b], &ran, false, "r"), Plan { run: vec![(schedule_key(b), b)], already: vec![a] });
        let forced = plan(&[a, b], &ran, true, "r").run;
        assert_eq!(forced, [("2026-03-01T00:00:00Z/again:r".to_owned(), a), (schedule_key(b), b)]);
        assert!(again_key(a + 1, &"x".repeat(REQUEST_ID_BYTES)).len() <= FIRE_KEY_BYTES);
    }
}
