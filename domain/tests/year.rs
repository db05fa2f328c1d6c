//! A year of decisions in six zones: leaders come, die between two writes and are away for days; jobs are paused, changed and
//! excepted; clocks change. At the end every nominal instant of every job has exactly one decision (F1, F2), and each is the one
//! that the job's policies allow. The rules are the domain's own, `due` and `decide`; the ledger is a table with a unique key.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use shardcron_domain::ExecutionId;
use shardcron_domain::firing::{DecisionKind, Intent, JobNow, Verdict, decide, due};
use shardcron_domain::job::{Misfire, MisfirePolicy, OverlapPolicy};
use shardcron_domain::limits::MISSED_INSTANTS;
use shardcron_domain::schedule::{DstSpec, Fold, Gap, Schedule, ScheduleSpec};
use shardcron_domain::units::{Span, parse_instant, rfc3339};
use std::collections::{BTreeMap, BTreeSet};

const ZONES: [&str; 6] = [
    "America/New_York",
    "Europe/Berlin",
    "Australia/Lord_Howe",
    "America/Sao_Paulo",
    "Africa/Casablanca",
    "Asia/Kolkata",
];
const PATTERNS: [&str; 10] = [
    "30 2 * * *",
    "0 0 * * *",
    "30 1,13 * * *",
    "15 */2 * * *",
    "0 9-17 * * 1-5",
    "*/20 * * * *",
    "45 2 1-7 * 0",
    "0 3 L * *",
    "0 12 * * 1#1",
    "59 23 31 * *",
];

/// A small generator of its own, so that a seed means the same for ever.
struct Dice(u64);

impl Dice {
    fn draw(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn between(&mut self, from: i64, to: i64) -> i64 {
        from + self.draw((to - from).unsigned_abs()) as i64
    }
}

struct Job {
    schedule: Schedule,
    before: Option<(Schedule, i64)>,
    misfire: MisfirePolicy,
    overlap: OverlapPolicy,
    /// Paused from..to.
    pause: (i64, i64),
    runs_ms: i64,
    next: Option<i64>,
    running: Option<(ExecutionId, i64)>,
    waiting: Vec<i64>,
    decisions: BTreeMap<i64, (DecisionKind, i64)>,
    /// Writes that met a decision that was there.
    duplicates: u64,
}

fn spec(zone: &str, pattern: &str, dice: &mut Dice) -> ScheduleSpec {
    let dst = match dice.draw(4) {
        0 => Some(DstSpec { gap: Some(Gap::Skip), fold: Some(Fold::Both) }),
        1 => Some(DstSpec { gap: Some(Gap::After), fold: Some(Fold::Second) }),
        _ => None,
    };
    let except = if dice.draw(3) == 0 { vec!["2026-12-25".into(), "cron: * * * * 6".into()] } else { Vec::new() };
    ScheduleSpec { cron: Some(pattern.into()), timezone: Some(zone.into()), dst, except, ..ScheduleSpec::default() }
}

/// When somebody leads: from and to, in order; the ends are sudden.
fn leaderships(start: i64, end: i64, dice: &mut Dice) -> Vec<(i64, i64)> {
    let mut all = Vec::new();
    let mut at = start + dice.between(0, 3_600_000);
    while at < end {
        let until = at + dice.between(60_000, 12 * 86_400_000);
        all.push((at, until.min(end)));
        // Mostly a fail-over of seconds, at times hours, rarely days.
        at = until
            + match dice.draw(10) {
                0 => dice.between(86_400_000, 5 * 86_400_000),
                1..=3 => dice.between(600_000, 86_400_000),
                _ => dice.between(1_000, 10_000),
            };
    }
    // Somebody leads at the end, so that what is missed by then is decided.
    all.push((end, end + 1));
    all
}

impl Job {
    /// Writes some intents, as the ledger's transaction does: under the unique key, with the next instant of the last one.
    fn write(&mut self, intents: &[Intent], next: Option<i64>, now: i64, dice: &mut Dice) {
        for intent in intents {
            let nominal = intent.nominal_ms();
            self.settle_ends(now);
            let state = JobNow {
                paused_by: (self.pause.0 <= now && now < self.pause.1).then(|| "ops".into()),
                active: self.running.iter().map(|(id, _)| *id).collect(),
                existing: None,
                decided: self.decisions.contains_key(&nominal),
                waiting: self.waiting.len(),
                turn: false,
            };
            let kind = match intent {
                _ if state.decided => {
                    self.duplicates += 1;
                    continue;
                }
                Intent::Record { kind, .. } => *kind,
                Intent::Fire { .. } => match decide(self.overlap, &state, true) {
                    Verdict::Fire | Verdict::Replace(_) => {
                        self.run(nominal, now, dice);
                        DecisionKind::Fired
                    }
                    Verdict::Skip(kind, ..) => kind,
                    Verdict::Wait(..) => {
                        self.waiting.push(nominal);
                        DecisionKind::Waiting
                    }
                    Verdict::NotYet | Verdict::Duplicate(_) => panic!("not for a new intent"),
                },
            };
            assert!(self.decisions.insert(nominal, (kind, now)).is_none(), "F1: {} twice", rfc3339(nominal));
        }
        self.next = next;
    }

    fn run(&mut self, nominal: i64, now: i64, dice: &mut Dice) {
        let id = ExecutionId(uuid::Uuid::from_u128(nominal as u128));
        self.running = Some((id, now + dice.between(1, self.runs_ms)));
    }

    /// What has ended gives the slot to what waits; a pause stops that as it stops an instant.
    fn settle_ends(&mut self, now: i64) {
        while let Some((_, ended)) = self.running.filter(|(_, ended)| *ended <= now) {
            self.running = None;
            if self.waiting.is_empty() {
                return;
            }
            let nominal = self.waiting.remove(0);
            let paused_by = (self.pause.0 <= ended && ended < self.pause.1).then(|| "ops".into());
            let state = JobNow { paused_by, waiting: self.waiting.len() + 1, turn: true, ..JobNow::default() };
            let kind = match decide(self.overlap, &state, true) {
                Verdict::Fire => {
                    let id = ExecutionId(uuid::Uuid::from_u128(nominal as u128));
                    self.running = Some((id, ended + self.runs_ms / 2 + 1));
                    DecisionKind::Fired
                }
                Verdict::Skip(kind, ..) => {
                    // Nothing runs: the next one has its turn at the same moment.
                    self.running = Some((ExecutionId(uuid::Uuid::nil()), ended));
                    kind
                }
                other => panic!("{other:?}"),
            };
            let was = self.decisions.insert(nominal, (kind, ended));
            assert_eq!(was.map(|(k, _)| k), Some(DecisionKind::Waiting), "what waits has its decision");
        }
    }

    /// One leader's look, cut at random as a crash would cut it.
    fn look(&mut self, now: i64, crash: bool, dice: &mut Dice) {
        while let Some(next) = self.next {
            let found = due(&self.schedule, &self.misfire, next, now).unwrap();
            if found.intents.is_empty() {
                return;
            }
            assert!(found.intents.len() <= MISSED_INSTANTS + self.misfire.limit as usize);
            let count = found.intents.len();
            let written = if crash { dice.draw(count as u64 + 1) as usize } else { count };
            let following = found.intents.get(written).map(Intent::nominal_ms).or(found.next_fire_ms);
            if written > 0 {
                self.write(&found.intents[..written], following, now, dice);
            }
            if crash {
                return;
            }
            // A second leader that has looked at the same state before, and writes after: every one is a duplicate.
            if dice.draw(40) == 0 {
                let next = self.next;
                self.write(&found.intents, next, now, dice);
            }
        }
    }

    fn oracle(&self, start: i64, end: i64) -> BTreeSet<i64> {
        let walk = |schedule: &Schedule, from: i64, to: i64| {
            let mut all = BTreeSet::new();
            let mut at = from;
            while let Some(next) = schedule.next_after(at).unwrap().filter(|next| *next <= to) {
                all.insert(next);
                at = next;
            }
            all
        };
        match &self.before {
            None => walk(&self.schedule, start, end),
            Some((before, changed)) => {
                let mut all = walk(before, start, *changed);
                // The new schedule alone, not the one that owes the old one's instants.
                all.extend(walk(&self.schedule, *changed, end));
                all
            }
        }
    }
}

fn jobs(start: i64, dice: &mut Dice) -> Vec<Job> {
    let mut jobs = Vec::new();
    for zone in ZONES {
        for pattern in PATTERNS {
            for (policy, limit) in [(Misfire::Skip, 100), (Misfire::FireOnce, 100), (Misfire::FireAll, 7)] {
                let overlap = match dice.draw(4) {
                    0 => OverlapPolicy::Allow,
                    1 => OverlapPolicy::Queue { limit: 1 + dice.draw(3) as u32 },
                    2 => OverlapPolicy::CancelRunning,
                    _ => OverlapPolicy::Skip,
                };
                let schedule = spec(zone, pattern, dice).compile().unwrap();
                let pause_from = start + dice.between(0, 300 * 86_400_000);
                jobs.push(Job {
                    next: schedule.next_after(start).unwrap(),
                    schedule,
                    before: None,
                    misfire: MisfirePolicy { policy, limit, grace: Span::secs(dice.draw(7_200)) },
                    overlap,
                    pause: (pause_from, pause_from + dice.between(3_600_000, 20 * 86_400_000)),
                    runs_ms: dice.between(60_000, 3 * 3_600_000),
                    running: None,
                    waiting: Vec::new(),
                    decisions: BTreeMap::new(),
                    duplicates: 0,
                });
            }
        }
    }
    jobs
}

/// The times at which a leader looks: when an instant is due, and some time after its beginning.
fn live(job: &mut Job, terms: &[(i64, i64)], change: Option<(i64, Schedule)>, dice: &mut Dice) {
    let mut change = change;
    for (from, to) in terms {
        let mut now = *from + dice.between(0, 2_000);
        loop {
            if let Some((at, _)) = change.as_ref().filter(|(at, _)| *at <= now) {
                let at = *at;
                let (_, new) = change.take().unwrap();
                apply(job, new, at);
            }
            if now >= *to {
                break;
            }
            job.look(now, false, dice);
            // A timer that wakes a little late, never early.
            let Some(next) = job.next else { break };
            now = next.max(now) + dice.between(1, 400);
        }
        // The leader dies somewhere within a last look.
        job.look(*to, true, dice);
    }
    if let Some((at, new)) = change {
        apply(job, new, at);
    }
}

/// The job is changed at `at`, whatever has been decided by then: what is due keeps the old schedule's instants.
fn apply(job: &mut Job, new: Schedule, at: i64) {
    let old = job.schedule.clone();
    let fresh = new.next_after(at).unwrap();
    job.next = job.next.filter(|next| *next <= at).or(fresh);
    job.before = Some((old.clone(), at));
    job.schedule = new.after(vec![(old, at)]);
}

#[test]
fn f2_a_year_of_six_zones_has_one_decision_for_each_instant() {
    let seed = std::env::var("YEAR_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_260_301);
    println!("YEAR_SEED={seed}");
    let mut dice = Dice(seed);
    let start = parse_instant("2026-01-01T00:00:00Z").unwrap();
    let end = parse_instant("2027-01-01T00:00:00Z").unwrap();
    let mut jobs = jobs(start, &mut dice);
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut instants, mut duplicates, mut changed, mut leaders) = (0, 0, 0, 0);
    for job in &mut jobs {
        let terms = leaderships(start, end, &mut dice);
        leaders += terms.len();
        let change = (dice.draw(3) == 0).then(|| {
            let zone = ZONES[dice.draw(6) as usize];
            let pattern = PATTERNS[dice.draw(10) as usize];
            (start + dice.between(60 * 86_400_000, 300 * 86_400_000), spec(zone, pattern, &mut dice).compile().unwrap())
        });
        changed += u64::from(change.is_some());
        live(job, &terms, change, &mut dice);
        job.look(end, false, &mut dice);
        job.settle_ends(i64::MAX - 1);
        let wanted = job.oracle(start, end);
        let found: BTreeSet<i64> = job.decisions.keys().copied().collect();
        let missing: Vec<String> = wanted.difference(&found).take(3).map(|ms| rfc3339(*ms)).collect();
        let invented: Vec<String> = found.difference(&wanted).take(3).map(|ms| rfc3339(*ms)).collect();
        assert_eq!((missing, invented), (Vec::new(), Vec::new()), "F2, YEAR_SEED={seed}");
        check_policies(job, seed);
        instants += found.len();
        duplicates += job.duplicates;
        for (kind, _) in job.decisions.values() {
            *counts.entry(kind.word()).or_default() += 1;
        }
    }
    println!(
        "{} jobs, {instants} instants, {leaders} leaderships, {changed} changed schedules, {duplicates} refused doubles, {counts:?}",
        jobs.len()
    );
    assert!(instants > 100_000 && duplicates > 100 && changed > 20, "the year was too quiet to show anything");
    for kind in ["fired", "skipped_overlap", "skipped_misfire", "skipped_paused", "coalesced", "skipped_exception"] {
        assert!(counts.get(kind).is_some_and(|n| *n > 50), "hardly any {kind}: {counts:?}");
    }
    assert!(!counts.contains_key("waiting"), "what waited has had its turn");
}

fn check_policies(job: &Job, seed: u64) {
    let grace = job.misfire.grace.as_ms();
    for (nominal, (kind, decided)) in &job.decisions {
        let late = decided - nominal;
        let at =
            || format!("{} decided {} s late, {:?}, YEAR_SEED={seed}", rfc3339(*nominal), late / 1_000, job.misfire);
        assert!(late >= 0, "never before its instant: {}", at());
        let queues = matches!(job.overlap, OverlapPolicy::Queue { .. });
        match kind {
            DecisionKind::Fired if job.misfire.policy == Misfire::Skip && !queues => assert!(late <= grace, "{}", at()),
            DecisionKind::Coalesced => assert!(job.misfire.policy == Misfire::FireOnce && late > grace, "{}", at()),
            DecisionKind::SkippedMisfire => {
                assert!(job.misfire.policy != Misfire::FireOnce && late > grace, "{}", at())
            }
            DecisionKind::SkippedPaused => assert!(job.pause.0 <= *decided && *decided < job.pause.1, "{}", at()),
            DecisionKind::SkippedOverlap => {
                assert!(matches!(job.overlap, OverlapPolicy::Skip | OverlapPolicy::Queue { .. }), "{}", at());
            }
            _ => {}
        }
    }
}
