//! A schedule that is ready to be asked: its kind, what bounds and moves it, and what an earlier version of it still owes.

use super::except::{ExceptionPool, Exceptions};
use super::{CronSchedule, ScheduleError};
use chrono_tz::Tz;
use std::sync::Arc;

/// A schedule that is ready to be asked. Small, since a leader holds a hundred thousand of them: what few have is behind a box.
#[derive(Clone, Debug)]
pub struct Schedule {
    kind: Kind,
    rules: Option<Box<Rules>>,
    /// Earlier schedules of the job, each with the last instant that it decides about, in their order.
    owed: Option<Box<[(Schedule, i64)]>>,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// By calendar.
    Cron(Box<CronSchedule>),
    /// Every so many milliseconds from the anchor.
    Every { every_ms: i64, anchor_ms: i64 },
    /// So many milliseconds after the end of the last execution.
    Delay(i64),
    /// Once.
    At(i64),
    /// Not by itself.
    Never,
}

/// What bounds and moves a schedule.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    from_ms: i64,
    until_ms: i64,
    except: Option<Arc<Exceptions>>,
    tz: Tz,
    jitter_ms: i64,
    seed: u64,
}

impl Rules {
    /// `None` if there is nothing to bound or move.
    pub(super) fn new(
        (from, until): (Option<i64>, Option<i64>),
        except: Option<Exceptions>,
        tz: Tz,
        (jitter_ms, job): (i64, &str),
    ) -> Option<Box<Self>> {
        let any = from.is_some() || until.is_some() || except.is_some() || jitter_ms > 0;
        any.then(|| {
            Box::new(Rules {
                from_ms: from.unwrap_or(i64::MIN),
                until_ms: until.unwrap_or(i64::MAX),
                except: except.map(Arc::new),
                tz,
                jitter_ms,
                seed: xxhash_rust::xxh3::xxh3_64(job.as_bytes()),
            })
        })
    }
}

impl Schedule {
    pub(super) fn new(kind: Kind, rules: Option<Box<Rules>>) -> Self {
        Schedule { kind, rules, owed: None }
    }

    /// The schedule of a job that has none: nothing is ever due.
    #[must_use]
    pub fn never() -> Self {
        Self::new(Kind::Never, None)
    }

    /// This schedule after earlier ones of the same job, each of which still decides about the instants up to and including the
    /// one given with it. This one begins after the last of those.
    #[must_use]
    pub fn after(mut self, owed: Vec<(Schedule, i64)>) -> Self {
        self.owed = if owed.is_empty() { None } else { Some(owed.into()) };
        self
    }

    /// The first instant strictly after `after_ms`; `None` if there is none ever or, for a fixed delay, none that is known yet.
    /// Excepted instants are among them.
    ///
    /// # Errors
    /// The calendar could not be computed; never "there is none".
    pub fn next_after(&self, after_ms: i64) -> Result<Option<i64>, ScheduleError> {
        let mut after = after_ms;
        for (earlier, until_ms) in self.owed.iter().flatten() {
            if after < *until_ms {
                if let Some(next) = earlier.next_of_own(after)?.filter(|next| next <= until_ms) {
                    return Ok(Some(next));
                }
                after = *until_ms;
            }
        }
        self.next_of_own(after)
    }

    fn next_of_own(&self, after_ms: i64) -> Result<Option<i64>, ScheduleError> {
        let (from, until) = self.rules.as_ref().map_or((i64::MIN, i64::MAX), |r| (r.from_ms, r.until_ms));
        let after = after_ms.max(from.saturating_sub(1));
        let next = match &self.kind {
            Kind::Every { every_ms, anchor_ms } => {
                let since = i128::from(after) - i128::from(*anchor_ms);
                let every = i128::from(*every_ms);
                i64::try_from(i128::from(*anchor_ms) + (since.div_euclid(every) + 1) * every).ok()
            }
            Kind::At(at_ms) => Some(*at_ms).filter(|at| *at > after),
            Kind::Cron(cron) => cron.next_after(after)?,
            Kind::Delay(_) | Kind::Never => None,
        };
        match next {
            // A caller would spin on this for ever (case S-05), so it is an error even where it can't happen.
            Some(instant) if instant <= after_ms => {
                Err(ScheduleError(format!("the instant after {after_ms} ms was computed as {instant} ms")))
            }
            other => Ok(other.filter(|next| *next <= until)),
        }
    }

    /// The span of a fixed delay.
    #[must_use]
    pub fn delay_ms(&self) -> Option<i64> {
        if let Kind::Delay(delay_ms) = self.kind { Some(delay_ms) } else { None }
    }

    /// The one instant of a fixed delay: the span after `ended_ms`, when its last execution ended or was decided against; `now_ms`
    /// if there was none. Not before `from`; `None` after `until`, and for every other kind of schedule.
    #[must_use]
    pub fn next_after_end(&self, ended_ms: Option<i64>, now_ms: i64) -> Option<i64> {
        let delay_ms = self.delay_ms()?;
        let (from, until) = self.rules.as_ref().map_or((i64::MIN, i64::MAX), |r| (r.from_ms, r.until_ms));
        let next = ended_ms.map_or(now_ms, |ended| ended.saturating_add(delay_ms)).max(from);
        Some(next).filter(|next| *next <= until)
    }

    /// When an instant of the schedule is to fire: the instant itself, or up to `jitter` later, always the same for the same job
    /// and instant. Never as late as the next instant, so that instants fire in their order.
    ///
    /// # Errors
    /// The calendar could not be computed.
    pub fn due_at(&self, nominal_ms: i64) -> Result<i64, ScheduleError> {
        let own = self.at(nominal_ms);
        let Some(rules) = own.rules.as_ref().filter(|rules| rules.jitter_ms > 0) else { return Ok(nominal_ms) };
        let room = own.next_of_own(nominal_ms)?.map_or(i64::MAX, |next| next.saturating_sub(nominal_ms));
        let span = rules.jitter_ms.min(room).max(1).unsigned_abs();
        let drawn = xxhash_rust::xxh3::xxh3_64_with_seed(&nominal_ms.to_le_bytes(), rules.seed) % span;
        Ok(nominal_ms.saturating_add_unsigned(drawn))
    }

    /// By which exception an instant is skipped.
    #[must_use]
    pub fn exception(&self, nominal_ms: i64) -> Option<String> {
        let own = self.at(nominal_ms);
        let rules = own.rules.as_ref()?;
        rules.except.as_ref()?.find(nominal_ms.div_euclid(1_000), rules.tz)
    }

    /// Whether an instant is skipped by an exception: [`Schedule::exception`] without its words.
    #[must_use]
    pub fn is_excepted(&self, nominal_ms: i64) -> bool {
        let own = self.at(nominal_ms);
        own.rules.as_ref().is_some_and(|rules| {
            rules.except.as_ref().is_some_and(|except| except.holds(nominal_ms.div_euclid(1_000), rules.tz))
        })
    }

    /// What a change of the clock does on the day of an instant, in a sentence; `None` on days without one.
    #[must_use]
    pub fn clock_change(&self, nominal_ms: i64) -> Option<String> {
        match &self.at(nominal_ms).kind {
            Kind::Cron(cron) => cron.clock_change(nominal_ms.div_euclid(1_000)),
            _ => None,
        }
    }

    /// The changes of the clock between an instant and the next one of the schedule that took a time of its pattern away, for good:
    /// each with its own instant, and in a sentence.
    ///
    /// # Errors
    /// The calendar could not be computed.
    pub fn lost_between(&self, after_ms: i64, before_ms: i64) -> Result<Vec<(i64, String)>, ScheduleError> {
        let from_ms = self.rules.as_ref().map_or(i64::MIN, |rules| rules.from_ms);
        let after = after_ms.max(from_ms.saturating_sub(1)).div_euclid(1_000);
        match &self.at(before_ms).kind {
            Kind::Cron(cron) => {
                let lost = cron.lost_between(after, before_ms.div_euclid(1_000))?;
                Ok(lost.into_iter().map(|(at, text)| (at.saturating_mul(1_000), text)).collect())
            }
            Kind::Every { .. } | Kind::Delay(_) | Kind::At(_) | Kind::Never => Ok(Vec::new()),
        }
    }

    /// The schedule that decides about an instant: an earlier one, as long as it owes it.
    fn at(&self, nominal_ms: i64) -> &Schedule {
        let owed = self.owed.iter().flatten().find(|(_, until_ms)| nominal_ms <= *until_ms);
        owed.map_or(self, |(earlier, _)| earlier)
    }

    /// Lets equal exceptions be held once for all jobs: a hundred thousand jobs may name the same calendar.
    pub fn share(&mut self, pool: &mut ExceptionPool) {
        if let Some(except) = self.rules.as_mut().and_then(|rules| rules.except.as_mut()) {
            *except = pool.keep(except.clone());
        }
    }
}
