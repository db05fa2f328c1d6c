//! What a job says about a program: its arguments, its environment, where it runs, as whom, and how much it may use.

use crate::limits::{CPU_PERCENT_MAX, PROGRAM_ENV_BYTES, PROGRAM_ENV_ENTRIES};
use crate::units::Span;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor, value};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// A program and everything that a job may say about it. In a job file either the arguments alone, `exec = ["python3", "job.py"]`,
/// or a table, `exec = { run = ["python3", "job.py"], env = { MODE = "full" } }`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramSpec {
    /// The program, then its arguments. No shell reads them.
    pub argv: Vec<String>,
    /// The rest.
    pub options: ProgramOptions,
}

/// What a job may say about a program beyond its arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramOptions {
    /// Variables of its environment; see [`check_variable`]. Nothing secret: the job is in the ledger for everybody to read.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Where it starts: a folder within the worker's `work_dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<String>,
    /// The user that it runs as. The worker must be root for that, and allow the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether the program reads, line by line on its standard input, which of its checkpoints are committed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub acknowledge: bool,
    /// How much it may use.
    #[serde(skip_serializing_if = "ProgramLimits::is_none")]
    pub limits: ProgramLimits,
}

/// How much a program may use. What is not given is the worker's own limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramLimits {
    /// Memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// Processor time of each of its processes, rounded up to whole seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_time: Option<Span>,
    /// Files that each of its processes may have open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_files: Option<u32>,
    /// The share of the processors that all of its processes have together, in hundredths of one: 150 is one and a half. Only where the
    /// worker has a cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<u32>,
    /// Processes and threads that it may have at the same time. Only where the worker has a cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
}

impl ProgramLimits {
    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == ProgramLimits::default()
    }

    /// The tighter of both, one by one: a job can't have more than the worker gives.
    #[must_use]
    pub fn within(self, most: ProgramLimits) -> ProgramLimits {
        fn tighter<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
            match (a, b) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            }
        }
        ProgramLimits {
            memory: tighter(self.memory, most.memory),
            cpu_time: tighter(self.cpu_time, most.cpu_time),
            open_files: tighter(self.open_files, most.open_files),
            cpu_percent: tighter(self.cpu_percent, most.cpu_percent),
            processes: tighter(self.processes, most.processes),
        }
    }
}

/// A number of bytes. In files it is text with a unit: `"512MiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Bytes {
    /// Reads `"512MiB"`.
    ///
    /// # Errors
    /// A sentence that says what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a size; write for example \"64KiB\", \"512MiB\" or \"2GiB\"");
        let trimmed = text.trim();
        let (number, factor) = UNITS
            .iter()
            .find_map(|(unit, factor)| trimmed.strip_suffix(unit).map(|number| (number, *factor)))
            .ok_or_else(wrong)?;
        let number: u64 = number.trim_end().parse().map_err(|_| wrong())?;
        number.checked_mul(factor).filter(|bytes| *bytes <= 1 << 50).map(Bytes).ok_or_else(wrong)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            // What was read is whole KiB; only a number made in code gets here.
            None => write!(f, "{}KiB", self.0.div_ceil(1 << 10)),
        }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in quotes such as \"512MiB\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Bytes, E> {
                Bytes::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    run: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dir: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    acknowledge: bool,
    #[serde(default, skip_serializing_if = "ProgramLimits::is_none")]
    limits: ProgramLimits,
}

impl Serialize for ProgramSpec {
    /// A program without options is its arguments alone, as it was before there were options.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.options == ProgramOptions::default() {
            return self.argv.serialize(serializer);
        }
        let ProgramOptions { env, dir, user, acknowledge, limits } = self.options.clone();
        Table { run: self.argv.clone(), env, dir, user, acknowledge, limits }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ProgramSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = ProgramSpec;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a program with its arguments, [\"python3\", \"job.py\"], or a table { run = [\"python3\", \"job.py\"], … }")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<ProgramSpec, A::Error> {
                let argv = Vec::deserialize(value::SeqAccessDeserializer::new(seq))?;
                Ok(ProgramSpec { argv, options: ProgramOptions::default() })
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ProgramSpec, A::Error> {
                let Table { run, env, dir, user, acknowledge, limits } =
                    Table::deserialize(value::MapAccessDeserializer::new(map))?;
                Ok(ProgramSpec { argv: run, options: ProgramOptions { env, dir, user, acknowledge, limits } })
            }
        }
        let spec = deserializer.deserialize_any(Either)?;
        spec.check_argv().map_err(D::Error::custom)?;
        Ok(spec)
    }
}

impl ProgramSpec {
    fn check_argv(&self) -> Result<(), String> {
        if self.argv.first().is_none_or(String::is_empty) {
            return Err("exec needs a program: exec = [\"python3\", \"job.py\"]".into());
        }
        if self.argv.iter().any(|argument| argument.contains('\0')) {
            return Err("an exec argument can't contain a NUL character".into());
        }
        Ok(())
    }
}

impl ProgramOptions {
    /// Everything that the types let through: the key below `handler.exec`, and a sentence.
    #[must_use]
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults: Vec<(String, String)> = self
            .env
            .iter()
            .filter_map(|(name, value)| Some((format!("env.{name}"), check_variable(name, value).err()?)))
            .collect();
        let bytes: usize = self.env.iter().map(|(name, value)| name.len() + value.len()).sum();
        if self.env.len() > PROGRAM_ENV_ENTRIES || bytes > PROGRAM_ENV_BYTES {
            let most = format!("{PROGRAM_ENV_ENTRIES} variables with {PROGRAM_ENV_BYTES} bytes in all are possible");
            faults.push(("env".into(), format!("{} variables with {bytes} bytes; {most}", self.env.len())));
        }
        if let Some(message) = self.dir.as_deref().and_then(|dir| check_dir(dir).err()) {
            faults.push(("dir".into(), message));
        }
        if self.user.as_deref().is_some_and(|user| !is_user_name(user)) {
            faults.push(("user".into(), "a user is named by its login name, as in user = \"batch\"".into()));
        }
        let limits = &self.limits;
        if limits.memory.is_some_and(|memory| memory < Bytes(1 << 20)) {
            faults.push(("limits.memory".into(), "no program starts with less than \"1MiB\"".into()));
        }
        if limits.cpu_time.is_some_and(|time| time < Span::secs(1)) {
            faults.push(("limits.cpu_time".into(), "processor time is counted in seconds; \"1s\" is the least".into()));
        }
        if limits.open_files.is_some_and(|files| files < 8) {
            faults.push(("limits.open_files".into(), "no program starts with fewer than 8 open files".into()));
        }
        if limits.cpu_percent.is_some_and(|percent| percent == 0 || percent > CPU_PERCENT_MAX) {
            let message = format!("100 is one whole processor; 1 to {CPU_PERCENT_MAX} are possible");
            faults.push(("limits.cpu_percent".into(), message));
        }
        if limits.processes == Some(0) {
            faults.push(("limits.processes".into(), "a program is a process itself; 1 is the least".into()));
        }
        faults
    }
}

fn is_user_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 32
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
        && !name.starts_with('-')
}

fn check_dir(dir: &str) -> Result<(), String> {
    let inside = "is a folder within the worker's work_dir, as in dir = \"reports\"; it can't lead out of it";
    if dir.is_empty() || dir.contains('\0') || dir.starts_with('/') || dir.split('/').any(|part| part == "..") {
        return Err(format!("'{}' {inside}", dir.escape_default()));
    }
    Ok(())
}

/// Variables that decide which code a program or its interpreter loads and runs, and those that are ours: a job that could set one
/// could run anything under the name of an allowed program (case Z-03).
const REFUSED: [&str; 23] = [
    "PATH",
    "HOME",
    "IFS",
    "ENV",
    "SHELL",
    "SHELLOPTS",
    "BASHOPTS",
    "PS4",
    "PROMPT_COMMAND",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "PERL5LIB",
    "PERL5OPT",
    "RUBYLIB",
    "RUBYOPT",
    "NODE_OPTIONS",
    "NODE_PATH",
    "JAVA_TOOL_OPTIONS",
    "GCONV_PATH",
    "GLIBC_TUNABLES",
    "EDITOR",
];
const REFUSED_BEGINNINGS: [&str; 7] = ["LD_", "DYLD_", "BASH_", "GIT_", "MALLOC_", "_JAVA", "SHARDCRON_"];
/// Words in the names of variables that hold secrets.
const SECRET_WORDS: [&str; 8] =
    ["PASSWORD", "PASSWD", "SECRET", "TOKEN", "CREDENTIAL", "API_KEY", "APIKEY", "PRIVATE_KEY"];

/// Whether a job may set a variable.
///
/// # Errors
/// Why not, and what to do instead.
pub fn check_variable(name: &str, value: &str) -> Result<(), String> {
    let shown = name.escape_default();
    let mut letters = name.bytes();
    let first = letters.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    if !first || !letters.all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        return Err(format!(
            "'{shown}' is no name of a variable; letters, digits and '_' are possible, a digit not at first"
        ));
    }
    let upper = name.to_ascii_uppercase();
    if REFUSED.contains(&upper.as_str()) || REFUSED_BEGINNINGS.iter().any(|beginning| upper.starts_with(beginning)) {
        return Err(format!(
            "a job can't set '{shown}': it would decide which code the program runs, or it is one of Shardcron's own. What a \
             program needs of it is set at the worker, with pass_env in its own configuration"
        ));
    }
    if SECRET_WORDS.iter().any(|word| upper.contains(word)) {
        return Err(format!(
            "'{shown}' looks like a secret, and a job is in the ledger for everybody to read. Set it in the worker's environment, \
             and let it pass there with pass_env = [\"{shown}\"] in the worker's configuration"
        ));
    }
    if value.contains('\0') {
        return Err("a variable can't contain a NUL character".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ProgramSpec, String> {
        serde_json::from_str(text).map_err(|e| e.to_string())
    }

    #[test]
    fn both_forms_are_read_and_the_short_one_stays_short() {
        let short = read(r#"["python3","job.py"]"#).unwrap();
        assert_eq!(serde_json::to_string(&short).unwrap(), r#"["python3","job.py"]"#);
        let table =
            read(r#"{"run":["a"],"env":{"MODE":"x"},"limits":{"memory":"512MiB","cpu_time":"1m"},"acknowledge":true}"#);
        let table = table.unwrap();
        assert_eq!((table.options.limits.memory, table.options.acknowledge), (Some(Bytes(512 << 20)), true));
        let again = serde_json::to_string(&table).unwrap();
        assert_eq!(read(&again).unwrap(), table, "{again}");
        assert_eq!(read(r#"{"run":["python3","job.py"]}"#).unwrap(), short, "no options, no difference");
        for (text, words) in [
            ("[]", "needs a program"),
            (r#"{"run":[]}"#, "needs a program"),
            (r#"["a\u0000"]"#, "NUL"),
            (r#"{"run":["a"],"envv":{}}"#, "envv"),
            (r#"{"env":{}}"#, "run"),
            (r#""python3 job.py""#, "with its arguments"),
            (r#"{"run":["a"],"limits":{"memory":512}}"#, "512MiB"),
        ] {
            assert!(read(text).unwrap_err().contains(words), "{text}: {:?}", read(text));
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("1KiB", 1_024), ("512MiB", 512 << 20), ("2 GiB", 2 << 30)] {
            assert_eq!(Bytes::parse(text), Ok(Bytes(bytes)));
            assert_eq!(Bytes::parse(&Bytes(bytes).to_string()), Ok(Bytes(bytes)));
        }
        for text in ["", "5", "5MB", "-1MiB", "1.5GiB", "99999999999999GiB", "MiB"] {
            assert!(Bytes::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn z_03_variables_that_choose_code_are_refused() {
        for name in [
            "LD_PRELOAD",
            "ld_preload",
            "PATH",
            "BASH_ENV",
            "PYTHONPATH",
            "NODE_OPTIONS",
            "SHARDCRON_ATTEMPT",
            "GIT_SSH",
        ] {
            assert!(check_variable(name, "x").unwrap_err().contains("can't set"), "{name}");
        }
        for name in ["", "1A", "A=B", "A B", "Ä", "A\0", "BASH_FUNC_ls%%"] {
            assert!(check_variable(name, "x").is_err(), "{name:?}");
        }
        assert!(check_variable("A", "x\0y").is_err());
        assert_eq!(check_variable("MODE", "; touch /tmp/x $(id)\n"), Ok(()), "a value is text, and no shell reads it");
    }

    #[test]
    fn z_05_secrets_do_not_go_into_a_job() {
        for name in ["PASSWORD", "DB_PASSWORD", "Api_Token", "AWS_SECRET_ACCESS_KEY"] {
            assert!(check_variable(name, "x").unwrap_err().contains("pass_env"), "{name}");
        }
    }

    #[test]
    fn faults_say_which_key() {
        let spec = read(
            r#"{"run":["a"],"env":{"PATH":"/x"},"dir":"../etc","user":"-x","limits":{"memory":"4KiB","cpu_time":"5ms","open_files":1,
                "cpu_percent":0,"processes":0}}"#,
        );
        let keys: Vec<String> = spec.unwrap().options.faults().into_iter().map(|(key, _)| key).collect();
        let limits =
            ["memory", "cpu_time", "open_files", "cpu_percent", "processes"].map(|key| format!("limits.{key}"));
        assert_eq!(keys[..3], ["env.PATH", "dir", "user"]);
        assert_eq!(keys[3..], limits);
    }

    #[test]
    fn a_job_gets_no_more_than_the_worker_gives() {
        let of = |memory, cpu_time, open_files, cpu_percent, processes| ProgramLimits {
            memory: Some(Bytes(memory)),
            cpu_time,
            open_files: Some(open_files),
            cpu_percent,
            processes,
        };
        let job = of(2, None, 9, Some(50), None);
        let most = of(1, Some(Span(3)), 10, Some(100), Some(7));
        let both = of(1, Some(Span(3)), 9, Some(50), Some(7));
        assert_eq!(job.within(most), both);
    }
}
