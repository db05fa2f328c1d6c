//! The coming instants of a schedule, for people.

use super::{Schedule, ScheduleError};
use crate::limits::INSTANTS_WALKED;

/// One firing to come, or a run of instants that an exception skips.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Coming {
    /// It fires.
    Fires {
        /// The instant.
        nominal_ms: i64,
        /// When it is to fire: later, if the schedule has a jitter.
        due_ms: i64,
        /// What a change of the clock does on that day.
        clock_change: Option<String>,
    },
    /// It does not.
    Skipped {
        /// The first of the run.
        first_ms: i64,
        /// The last of it.
        last_ms: i64,
        /// How many.
        count: usize,
        /// The exception.
        exception: String,
    },
    /// A change of the clock takes it away: its time does not exist on that day, and nothing makes up for it.
    Lost {
        /// The instant of the change.
        at_ms: i64,
        /// In a sentence.
        clock_change: String,
    },
}

/// The next `count` firings strictly after an instant, and the excepted ones between them; runs by the same exception are one entry.
/// The flag says that the search was given up after [`INSTANTS_WALKED`] instants: it may be that everything is excepted.
///
/// # Errors
/// The calendar could not be computed.
pub fn coming(schedule: &Schedule, after_ms: i64, count: usize) -> Result<(Vec<Coming>, bool), ScheduleError> {
    let (mut found, mut fires, mut skipped, mut at) = (Vec::new(), 0, 0, after_ms);
    while fires < count {
        let Some(nominal_ms) = schedule.next_after(at)? else { break };
        for (at_ms, clock_change) in schedule.lost_between(at, nominal_ms)? {
            found.push(Coming::Lost { at_ms, clock_change });
        }
        at = nominal_ms;
        if let Some(exception) = schedule.exception(nominal_ms) {
            skipped += 1;
            note_skipped(&mut found, nominal_ms, exception);
            if skipped >= INSTANTS_WALKED {
                return Ok((found, true));
            }
            continue;
        }
        let clock_change = schedule.clock_change(nominal_ms);
        found.push(Coming::Fires { nominal_ms, due_ms: schedule.due_at(nominal_ms)?, clock_change });
        fires += 1;
    }
    Ok((found, false))
}

fn note_skipped(found: &mut Vec<Coming>, nominal_ms: i64, by: String) {
    match found.last_mut() {
        Some(Coming::Skipped { last_ms, count, exception, .. }) if *exception == by => {
            *last_ms = nominal_ms;
            *count += 1;
        }
        _ => found.push(Coming::Skipped { first_ms: nominal_ms, last_ms: nominal_ms, count: 1, exception: by }),
    }
}
