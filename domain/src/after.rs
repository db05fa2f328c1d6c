//! Jobs that follow other jobs: who follows whom, and which ends of upstreams make one firing.
//!
//! Nothing here is a message that could be lost: the ledger notes with each upstream execution which jobs watch it, and the leader
//! looks at those notes ([`look`]). Decision 0018 says why the sets are what they are.

use crate::execution::Phase;
use crate::ids::ExecutionId;
use crate::job::check_name;
use crate::limits::{JOB_NAME_BYTES, UPSTREAM_ENDS_KEPT, UPSTREAMS_MAX};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::collections::{BTreeMap, BTreeSet};

/// Whom a job follows. In a job file: `["load"]`, or `{ jobs = ["load", "clean"], mode = "any", on = "end" }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfterSpec {
    /// The upstream jobs.
    pub jobs: Vec<String>,
    /// Whether all of them or any one makes a firing.
    pub mode: Mode,
    /// Which ends count.
    pub on: On,
}

/// Whether all upstreams or any one makes a firing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One firing for each set with an end of each upstream.
    #[default]
    All,
    /// One firing for each end.
    Any,
}

/// Which ends count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum On {
    /// Good ones. Another is recorded as the reason why the job did not fire.
    #[default]
    Success,
    /// Any: well, badly or cancelled.
    End,
}

impl On {
    fn satisfied(self, phase: Phase) -> bool {
        match self {
            On::Success => phase == Phase::Success,
            On::End => phase.is_terminal(),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    jobs: Vec<String>,
    #[serde(default)]
    mode: Mode,
    #[serde(default)]
    on: On,
}

impl Serialize for AfterSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.mode == Mode::All && self.on == On::Success {
            return self.jobs.serialize(serializer);
        }
        Table { jobs: self.jobs.clone(), mode: self.mode, on: self.on }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for AfterSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl<'de> de::Visitor<'de> for Form {
            type Value = AfterSpec;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of jobs such as [\"load\"], or { jobs = [\"load\", \"clean\"], mode = \"any\", on = \"end\" }")
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, seq: A) -> Result<AfterSpec, A::Error> {
                let jobs = Vec::deserialize(de::value::SeqAccessDeserializer::new(seq))?;
                Ok(AfterSpec { jobs, mode: Mode::All, on: On::Success })
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<AfterSpec, A::Error> {
                let Table { jobs, mode, on } = Table::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(AfterSpec { jobs, mode, on })
            }
        }
        deserializer.deserialize_any(Form)
    }
}

impl AfterSpec {
    /// All of these, ended well.
    #[must_use]
    pub fn of(jobs: &[&str]) -> Self {
        AfterSpec { jobs: jobs.iter().map(|job| (*job).to_owned()).collect(), mode: Mode::All, on: On::Success }
    }

    /// Checks what one job's specification can show.
    ///
    /// # Errors
    /// A sentence.
    pub fn validate(&self, own_name: &str) -> Result<(), String> {
        if self.jobs.is_empty() {
            return Err("it names no job; leave the key out for a job that follows none".into());
        }
        if self.jobs.len() > UPSTREAMS_MAX {
            return Err(format!("{} upstream jobs; {UPSTREAMS_MAX} are the most", self.jobs.len()));
        }
        let mut seen = BTreeSet::new();
        for job in &self.jobs {
            check_name(job, JOB_NAME_BYTES)?;
            if job == own_name {
                return Err(format!("a job can't follow itself ({job} → {job})"));
            }
            if !seen.insert(job) {
                return Err(format!("'{job}' is named twice"));
            }
        }
        Ok(())
    }
}

/// A cycle among jobs, if there is one, as `a → b → a`: each follows the next. `follows` has the upstreams of each job.
#[must_use]
pub fn cycle(follows: &BTreeMap<String, Vec<String>>) -> Option<String> {
    let mut done: BTreeSet<&str> = BTreeSet::new();
    for start in follows.keys().map(String::as_str) {
        if done.contains(start) {
            continue;
        }
        // Depth first with a stack of its own: a chain of a hundred thousand jobs must not end the process.
        let mut path: Vec<(&str, usize)> = vec![(start, 0)];
        let mut on_path = BTreeSet::from([start]);
        while let Some((job, next)) = path.last_mut() {
            let job: &str = job;
            let Some(upstream) = follows.get(job).and_then(|of| of.get(*next)).map(String::as_str) else {
                done.insert(job);
                on_path.remove(job);
                path.pop();
                continue;
            };
            *next += 1;
            if on_path.contains(upstream) {
                let circle = path.iter().map(|(job, _)| *job).skip_while(|job| *job != upstream);
                return Some(circle.chain([upstream]).collect::<Vec<_>>().join(" → "));
            }
            if !done.contains(upstream) {
                path.push((upstream, 0));
                on_path.insert(upstream);
            }
        }
    }
    None
}

/// An upstream's execution that a job has not taken up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The ledger's number of the note.
    pub id: i64,
    /// The upstream job.
    pub upstream: String,
    /// Its execution.
    pub execution: ExecutionId,
    /// The instant that it is for.
    pub nominal_ms: i64,
    /// Where it is.
    pub phase: Phase,
}

/// A firing that follows from ends, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Follow {
    /// Its identity: of the executions that it follows.
    pub fire_key: String,
    /// The instant that it is for: theirs, and the latest of them where they differ.
    pub nominal_ms: i64,
    /// The executions that it follows, one of each upstream, in the order of the specification.
    pub of: Vec<Watched>,
    /// The notes that go with it.
    pub takes_up: Vec<i64>,
    /// Why the job does not fire, if it does not.
    pub refused: Option<String>,
}

/// What follows from a job's notes, and the notes that are of no use any more.
#[must_use]
pub fn look(spec: &AfterSpec, watched: &[Watched]) -> (Vec<Follow>, Vec<i64>) {
    let (mine, strangers): (Vec<&Watched>, Vec<&Watched>) =
        watched.iter().partition(|w| spec.jobs.contains(&w.upstream));
    // The job followed them once.
    let mut drop: Vec<i64> = strangers.iter().map(|w| w.id).collect();
    let follows = match spec.mode {
        Mode::Any => {
            let ended = mine.iter().filter(|w| w.phase.is_terminal());
            ended.map(|w| follow(spec.on, vec![(*w).clone()], vec![w.id])).collect()
        }
        Mode::All => sets(spec, &mine, &mut drop),
    };
    (follows, drop)
}

/// Sets: `t` is the latest of the upstreams' oldest instants; of each upstream the set has the latest execution up to `t`, and takes
/// up the earlier ones with it. One that still runs is waited for.
fn sets(spec: &AfterSpec, mine: &[&Watched], drop: &mut Vec<i64>) -> Vec<Follow> {
    let mut queues: Vec<Vec<&Watched>> = spec
        .jobs
        .iter()
        .map(|job| {
            let mut of: Vec<&Watched> = mine.iter().copied().filter(|w| w.upstream == *job).collect();
            of.sort_by_key(|w| (w.nominal_ms, w.execution));
            of
        })
        .collect();
    let mut follows = Vec::new();
    loop {
        let oldest: Option<Vec<i64>> = queues.iter().map(|of| of.first().map(|w| w.nominal_ms)).collect();
        let Some(upto) = oldest.and_then(|all| all.into_iter().max()) else { break };
        let reach: Vec<usize> = queues.iter().map(|of| of.partition_point(|w| w.nominal_ms <= upto)).collect();
        let runs = queues.iter().zip(&reach).any(|(of, n)| of[..*n].iter().any(|w| !w.phase.is_terminal()));
        if runs {
            break;
        }
        let (mut of, mut takes_up) = (Vec::new(), Vec::new());
        for (queue, n) in queues.iter_mut().zip(reach) {
            let taken: Vec<&Watched> = queue.drain(..n).collect();
            takes_up.extend(taken.iter().map(|w| w.id));
            of.extend(taken.last().map(|w| (*w).clone()));
        }
        follows.push(follow(spec.on, of, takes_up));
    }
    // An upstream that never ends must not let the others' notes grow without bound.
    for queue in queues {
        let excess = queue.len().saturating_sub(UPSTREAM_ENDS_KEPT);
        drop.extend(queue[..excess].iter().filter(|w| w.phase.is_terminal()).map(|w| w.id));
    }
    follows
}

fn follow(on: On, of: Vec<Watched>, takes_up: Vec<i64>) -> Follow {
    let nominal_ms = of.iter().map(|w| w.nominal_ms).max().unwrap_or(0);
    let bad: Vec<String> = of
        .iter()
        .filter(|w| !on.satisfied(w.phase))
        .map(|w| format!("execution {} of upstream job '{}' ended {}", w.execution, w.upstream, w.phase.word()))
        .collect();
    let refused = (!bad.is_empty()).then(|| format!("{}, and the job follows a success only", bad.join(" and ")));
    Follow { fire_key: key(&of), nominal_ms, of, takes_up, refused }
}

fn key(of: &[Watched]) -> String {
    let ids: Vec<ExecutionId> = of.iter().map(|w| w.execution).collect();
    set_key(&ids)
}

/// The fire key of what follows a set of executions: the same set has the same key, whoever looks and whenever.
#[must_use]
pub fn set_key(of: &[ExecutionId]) -> String {
    if let [one] = of {
        return format!("after:{one}");
    }
    let mut ids: Vec<&[u8; 16]> = of.iter().map(ExecutionId::as_bytes).collect();
    ids.sort_unstable();
    let bytes: Vec<u8> = ids.into_iter().flatten().copied().collect();
    format!("after:{}-executions:{:032x}", of.len(), xxhash_rust::xxh3::xxh3_128(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(id: i64, upstream: &str, nominal_ms: i64, phase: Phase) -> Watched {
        let execution = ExecutionId(uuid::Uuid::from_u128(id as u128));
        Watched { id, upstream: upstream.into(), execution, nominal_ms, phase }
    }

    fn fired(spec: &AfterSpec, notes: &[Watched]) -> Vec<(i64, Vec<i64>, Vec<i64>, bool)> {
        let (follows, _) = look(spec, notes);
        let ids = |of: &[Watched]| of.iter().map(|w| w.id).collect();
        follows.iter().map(|f| (f.nominal_ms, ids(&f.of), f.takes_up.clone(), f.refused.is_none())).collect()
    }

    use Phase::{Cancelled, Failed, Running, Success};

    #[test]
    fn forms_of_the_job_file() {
        #[derive(Deserialize)]
        struct Doc {
            after: AfterSpec,
        }
        let read = |text: &str| toml::from_str::<Doc>(&format!("after = {text}")).map(|d| d.after);
        let short = read("[\"a\", \"b\"]").unwrap();
        assert_eq!(short, AfterSpec::of(&["a", "b"]));
        assert_eq!(read("{ jobs = [\"a\", \"b\"], mode = \"all\", on = \"success\" }").unwrap(), short);
        assert_eq!(serde_json::to_string(&short).unwrap(), "[\"a\",\"b\"]");
        let long = read("{ jobs = [\"a\"], mode = \"any\", on = \"end\" }").unwrap();
        assert_eq!((long.mode, long.on), (Mode::Any, On::End));
        assert_eq!(serde_json::from_str::<AfterSpec>(&serde_json::to_string(&long).unwrap()).unwrap(), long);
        assert!(read("{ jobs = [\"a\"], when = \"x\" }").unwrap_err().message().contains("when"));
        assert!(read("\"a\"").unwrap_err().message().contains("a list of jobs"));
        assert!(short.validate("b").unwrap_err().contains("b → b"));
        assert!(AfterSpec::of(&["a", "a"]).validate("c").unwrap_err().contains("twice"));
        assert!(AfterSpec::of(&[]).validate("c").is_err());
    }

    #[test]
    fn a_cycle_is_printed() {
        let follows = |edges: &[(&str, &[&str])]| -> BTreeMap<String, Vec<String>> {
            edges.iter().map(|(a, of)| ((*a).into(), of.iter().map(|b| (*b).into()).collect())).collect()
        };
        assert_eq!(cycle(&follows(&[("a", &["b"]), ("b", &["a"])])).as_deref(), Some("a → b → a"));
        assert_eq!(
            cycle(&follows(&[("a", &["x", "b"]), ("b", &["c"]), ("c", &["b"]), ("x", &[])])).as_deref(),
            Some("b → c → b")
        );
        assert_eq!(cycle(&follows(&[("d", &["b", "c"]), ("b", &["a"]), ("c", &["a"])])), None, "a diamond is none");
        let long: BTreeMap<String, Vec<String>> =
            (0..100_000).map(|i| (format!("j{i:06}"), vec![format!("j{:06}", i + 1)])).collect();
        assert_eq!(cycle(&long), None);
    }

    #[test]
    fn one_upstream_fires_for_each_of_its_ends() {
        let spec = AfterSpec::of(&["a"]);
        let notes = [watched(1, "a", 10, Success), watched(2, "a", 20, Running), watched(3, "a", 30, Failed)];
        assert_eq!(fired(&spec, &notes), [(10, vec![1], vec![1], true)], "the third is behind one that runs");
        let ended = [watched(2, "a", 20, Success), watched(3, "a", 30, Failed)];
        assert_eq!(fired(&spec, &ended), [(20, vec![2], vec![2], true), (30, vec![3], vec![3], false)]);
        let on_end = AfterSpec { on: On::End, ..spec };
        assert!(fired(&on_end, &[watched(4, "a", 30, Cancelled)])[0].3);
    }

    #[test]
    fn any_fires_for_each_end_of_each() {
        let spec = AfterSpec { mode: Mode::Any, ..AfterSpec::of(&["a", "b"]) };
        let notes = [watched(1, "a", 10, Running), watched(2, "b", 10, Success), watched(3, "a", 20, Success)];
        assert_eq!(fired(&spec, &notes).len(), 2);
    }

    #[test]
    fn a_fan_in_goes_by_the_instant_where_the_schedules_agree() {
        let spec = AfterSpec::of(&["a", "b"]);
        // b is a day behind: its day 1 still belongs to a's day 1, though a has ended day 2.
        let late = [watched(1, "a", 1, Success), watched(2, "a", 2, Success), watched(3, "b", 1, Running)];
        assert_eq!(fired(&spec, &late), []);
        let later = [
            watched(1, "a", 1, Success),
            watched(2, "a", 2, Success),
            watched(3, "b", 1, Success),
            watched(4, "b", 2, Running),
        ];
        assert_eq!(fired(&spec, &later), [(1, vec![1, 3], vec![1, 3], true)]);
    }

    #[test]
    fn a_fan_in_of_different_schedules_takes_the_latest_of_each() {
        let spec = AfterSpec::of(&["hourly", "daily"]);
        let mut notes: Vec<Watched> = (1..=24).map(|h| watched(h, "hourly", h, Success)).collect();
        assert_eq!(fired(&spec, &notes), [], "the daily one has not come");
        notes.push(watched(100, "daily", 24, Running));
        notes.push(watched(25, "hourly", 25, Success));
        assert_eq!(fired(&spec, &notes), []);
        notes[24].phase = Success;
        let took: Vec<i64> = (1..=24).chain([100]).collect();
        assert_eq!(fired(&spec, &notes), [(24, vec![24, 100], took, true)], "and the 25th is for the next set");
        // The hourly one of the same instant still runs: it is waited for.
        notes[23].phase = Running;
        assert_eq!(fired(&spec, &notes), []);
    }

    #[test]
    fn an_upstream_that_skipped_an_instant_holds_nobody() {
        let spec = AfterSpec::of(&["a", "b"]);
        // a skipped instant 1 by its own overlap policy: b's 1 goes into the set of 2.
        let notes = [watched(2, "a", 2, Success), watched(3, "b", 1, Success), watched(4, "b", 2, Success)];
        assert_eq!(fired(&spec, &notes), [(2, vec![2, 4], vec![2, 3, 4], true)]);
    }

    #[test]
    fn a_set_is_the_same_whoever_looks() {
        let spec = AfterSpec::of(&["a", "b"]);
        let notes = [watched(1, "a", 1, Success), watched(3, "b", 1, Failed)];
        let back: Vec<Watched> = notes.iter().rev().cloned().collect();
        let (one, _) = look(&spec, &notes);
        let (two, _) = look(&AfterSpec::of(&["b", "a"]), &back);
        assert_eq!((one.len(), &one[0].fire_key), (1, &two[0].fire_key));
        assert!(one[0].fire_key.len() < 100);
        assert!(one[0].refused.as_ref().unwrap().contains("upstream job 'b' ended failed"));
    }

    #[test]
    fn notes_are_bounded_and_strangers_dropped() {
        let spec = AfterSpec::of(&["a", "b"]);
        let mut notes: Vec<Watched> = (0..1_500).map(|i| watched(i, "a", i, Success)).collect();
        notes.push(watched(9_999, "gone", 1, Success));
        let (follows, drop) = look(&spec, &notes);
        assert_eq!((follows.len(), drop.len()), (0, 1_301));
        assert!(drop.contains(&0) && drop.contains(&1_299) && !drop.contains(&1_300));
    }
}
