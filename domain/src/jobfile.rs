//! Job files: TOML with one table for each job. Errors name the line and the key.
//!
//! Each job is read by itself, and after a fault it is read again without the key at fault, so that a person sees all faults at
//! once and not one after the other.

use crate::address::without_passwords;
use crate::job::JobSpec;
use crate::limits::{FAULTS_OF_FILE, FAULTS_OF_JOB};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// A fault in a job file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct JobFileError {
    /// Counted from 1.
    pub line: usize,
    /// Which job and key, what is wrong, and what would be right.
    pub message: String,
}

/// What a job file holds.
#[derive(Clone, Debug, Default)]
pub struct JobFile {
    /// The jobs without a fault, by name.
    pub jobs: Vec<Placed>,
    /// The faults in the order of their lines, [`FAULTS_OF_FILE`] at most.
    pub faults: Vec<JobFileError>,
}

/// A job and where it stands.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The job, checked.
    pub spec: JobSpec,
    /// The line of its header.
    pub line: usize,
    /// The lines of its keys, dotted where they stand in a table.
    pub keys: BTreeMap<String, usize>,
}

impl Placed {
    /// The line of a key, or of the nearest table around it that is there.
    #[must_use]
    pub fn line_of(&self, key: &str) -> usize {
        nearest(&self.keys, key).unwrap_or(self.line)
    }
}

/// Reads and checks a job file that names no calendar files.
///
/// # Errors
/// The first fault.
pub fn parse(text: &str) -> Result<Vec<JobSpec>, JobFileError> {
    let file = read(text, &|name| Err(format!("there is no calendar '{name}' beside a text")));
    match file.faults.into_iter().next() {
        Some(fault) => Err(fault),
        None => Ok(file.jobs.into_iter().map(|placed| placed.spec).collect()),
    }
}

/// Reads and checks a job file. `calendar` gives the text of a calendar file next to it, or says why it can't.
#[must_use]
pub fn read(text: &str, calendar: &dyn Fn(&str) -> Result<String, String>) -> JobFile {
    let mut reader = Reader { text, calendar, file: JobFile::default() };
    match DeTable::parse(text) {
        Ok(table) => reader.read(table.into_inner()),
        Err(e) => {
            let at = e.span().map_or(0, |s| s.start);
            reader.fault(line_of(text, at), place(text, at, &without_values(e.message())));
        }
    }
    let mut file = reader.file;
    refuse_circles(&mut file);
    if file.jobs.is_empty() && file.faults.is_empty() {
        let message = "there is no job in it; a job begins with [job.its-name]".into();
        file.faults.push(JobFileError { line: 1, message });
    }
    file.faults.sort_by_key(|fault| fault.line);
    file
}

/// Jobs that follow each other in a circle would wait for each other for ever. Those that a circle leads out of the file are found
/// by the ledger.
fn refuse_circles(file: &mut JobFile) {
    let of = |placed: &Placed| Some((placed.spec.name.clone(), placed.spec.after.as_ref()?.jobs.clone()));
    let Some(circle) = crate::after::cycle(&file.jobs.iter().filter_map(of).collect()) else { return };
    let first = circle.split(' ').next().unwrap_or_default();
    let line = file.jobs.iter().find(|p| p.spec.name == first).map_or(1, |placed| placed.line_of("after"));
    let message =
        format!("job '{first}': after: the jobs follow each other in a circle ({circle}); take one of the arrows out");
    file.faults.push(JobFileError { line, message });
}

struct Reader<'t> {
    text: &'t str,
    calendar: &'t dyn Fn(&str) -> Result<String, String>,
    file: JobFile,
}

impl<'t> Reader<'t> {
    fn fault(&mut self, line: usize, message: String) {
        let message = without_passwords(&message);
        if self.file.faults.len() < FAULTS_OF_FILE {
            self.file.faults.push(JobFileError { line, message });
        }
    }

    fn read(&mut self, table: DeTable<'t>) {
        for (key, value) in table {
            let line = line_of(self.text, key.span().start);
            match (key.get_ref().as_ref(), value.into_inner()) {
                ("job", DeValue::Table(jobs)) => {
                    for (name, job) in jobs {
                        let line = line_of(self.text, name.span().start);
                        self.read_job(name.get_ref(), line, job);
                    }
                }
                ("job", _) => self.fault(line, "job is a table: a job begins with [job.its-name]".into()),
                (other, _) => self.fault(line, format!("unknown key '{other}'; a job begins with [job.its-name]")),
            }
        }
    }

    fn read_job(&mut self, name: &str, line: usize, job: Spanned<DeValue<'t>>) {
        let span = job.span();
        let DeValue::Table(mut table) = job.into_inner() else {
            return self.fault(line, format!("job '{name}': a job is a table: [job.{name}]"));
        };
        let keys = self.lines_of(&table);
        if let Some(line) = keys.get("name") {
            let message = format!("job '{name}': name: a job's name is its table's, [job.{name}]; leave the key out");
            self.fault(*line, message);
            table.remove("name");
        }
        let mut taken_out = BTreeSet::new();
        let read = loop {
            let value = Spanned::new(span.clone(), DeValue::Table(table.clone()));
            let fault = match JobSpec::deserialize(ValueDeserializer::from(value)) {
                Ok(spec) => break Some(spec),
                Err(fault) => fault,
            };
            let at = fault.span().map_or(span.start, |s| s.start);
            let missing = fault.message().strip_prefix("missing field `").and_then(|m| m.split('`').next());
            if missing.is_some_and(|key| taken_out.contains(key)) {
                break None;
            }
            let whole_job = missing.is_some() && fault.span().is_none_or(|s| s == span);
            let at_line = if whole_job { line } else { line_of(self.text, at) };
            self.fault(
                at_line,
                format!("job '{name}': {}", without_values(fault.message()).trim().replace('\n', "; ")),
            );
            let key = table.iter().find(|(k, v)| k.span().contains(&at) || v.span().contains(&at));
            let key = key.map(|(k, _)| k.get_ref().to_string());
            match key.filter(|_| !whole_job && taken_out.len() < FAULTS_OF_JOB) {
                Some(key) => {
                    table.remove(key.as_str());
                    taken_out.insert(key);
                }
                None => break None,
            }
        };
        let Some(spec) = read else { return };
        let placed = Placed { spec: JobSpec { name: name.to_owned(), ..spec }, line, keys };
        self.check(placed, taken_out.is_empty());
    }

    fn check(&mut self, mut placed: Placed, sound: bool) {
        let name = placed.spec.name.clone();
        let (line, mut sound) = (placed.line_of("schedule.except"), sound);
        if let Some(schedule) = &mut placed.spec.schedule
            && let Err(message) = schedule.freeze_calendars(self.calendar)
        {
            self.fault(line, format!("job '{name}': schedule: {message}"));
            // What the calendar would have been is not known, and its absence is no second fault.
            schedule.except.clear();
            schedule.calendars.clear();
            sound = false;
        }
        for fault in placed.spec.faults() {
            self.fault(placed.line_of(&fault.key), format!("job '{name}': {fault}"));
            sound = false;
        }
        if sound {
            self.file.jobs.push(placed);
        }
    }

    fn lines_of(&self, table: &DeTable<'_>) -> BTreeMap<String, usize> {
        let mut lines = BTreeMap::new();
        add_lines(&mut lines, self.text, "", table);
        lines
    }
}

fn add_lines(lines: &mut BTreeMap<String, usize>, text: &str, above: &str, table: &DeTable<'_>) {
    for (key, value) in table {
        let dotted = format!("{above}{}", key.get_ref());
        if let DeValue::Table(inner) = value.get_ref() {
            add_lines(lines, text, &format!("{dotted}."), inner);
        }
        lines.insert(dotted, line_of(text, key.span().start));
    }
}

fn nearest(lines: &BTreeMap<String, usize>, key: &str) -> Option<usize> {
    let mut key = key;
    loop {
        if let Some(line) = lines.get(key) {
            return Some(*line);
        }
        key = key.rsplit_once('.')?.0;
    }
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1
}

/// A fault of the syntax does not say in which job it is; that can be told from the last table header before it.
fn place(text: &str, at: usize, message: &str) -> String {
    let before = &text[..text.floor_char_boundary(at.min(text.len()))];
    let this_line = text[before.rfind('\n').map_or(0, |i| i + 1)..].lines().next().unwrap_or("");
    let header = before.lines().chain([this_line]).filter_map(|l| l.trim().strip_prefix("[job.")).next_back();
    let message = message.trim().replace('\n', "; ");
    match header.and_then(|h| h.split([']', '.']).next()) {
        Some(job) => format!("job '{job}': {message}"),
        None => message,
    }
}

/// What the reader of a file says of a wrong value, without the texts that it quotes where another kind of value belongs, and without the
/// passwords of addresses: the line is named, and what stands there may be a secret at a place where none belongs (case Z-05). What is one of a
/// few words, a time or a name is quoted; nobody finds their mistake otherwise.
#[must_use]
pub fn without_values(message: &str) -> String {
    const QUOTED: &str = "string \"";
    let (mut kept, mut rest) = (String::with_capacity(message.len()), message);
    while let Some((before, quoted)) = rest.split_once(QUOTED) {
        kept.push_str(before);
        kept.push_str("a text");
        let mut escaped = false;
        let end = quoted.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        rest = end.map_or("", |end| &quoted[end + 1..]);
    }
    without_passwords(&(kept + rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{HandlerSpec, Misfire, OverlapPolicy, Timeout};
    use crate::units::Span;

    #[test]
    fn z_05_a_fault_quotes_no_value() {
        for (message, said) in [
            ("invalid type: string \"hush\", expected a map", "invalid type: a text, expected a map"),
            (
                "invalid value: string \"a\\\"hush\\\\\", expected x: string \"b\"",
                "invalid value: a text, expected x: a text",
            ),
            ("unknown field `x`, expected `y`", "unknown field `x`, expected `y`"),
            ("invalid type: string \"hush", "invalid type: a text"),
            ("unknown variant `mysql://u:hush@h/d`, expected `y`", "unknown variant `mysql://…@h/d`, expected `y`"),
        ] {
            assert_eq!(without_values(message), said);
        }
    }

    #[test]
    fn z_05_an_address_at_any_place_shows_no_password() {
        for key in [
            "misfire = \"mysql://u:hush@h/d\"",
            "overlap = \"mysql://u:hush@h/d\"",
            "timeout = \"mysql://u:hush@h/d\"",
            "takeover = \"mysql://u:hush@h/d\"",
            "schedule = { cron = \"mysql://u:hush@h/d\" }",
            "schedule = { every = \"1m\", timezone = \"mysql://u:hush@h/d\" }",
            "schedule = { every = \"mysql://u:hush@h/d\" }",
            "schedule = { at = \"mysql://u:hush@h/d\" }",
            "retry = { first = \"mysql://u:hush@h/d\" }",
            "shards = { query = { database = \"mysql://u:hush@h/d\", table = \"t\", key = \"k\", count = 3 } }",
            "shards = \"mysql://u:hush@h/d\"",
            "tier = \"mysql://u:hush@h/d\"",
            "tier = \"mysql://u:hush/d\"",
            "after = [\"mysql://u:hush@h/d\"]",
            "\"mysql://u:hush@h/d\" = 1",
        ] {
            let text = format!("[job.a]\nhandler = {{ rust = \"noop\" }}\n{key}\n");
            let file = read(&text, &|_| Err("none".into()));
            assert!(!file.faults.is_empty(), "{key}");
            assert!(!format!("{:?}", file.faults).contains("hush"), "{key}: {:?}", file.faults);
        }
    }

    const GOOD: &str = r#"
[job.reconcile-flights]
schedule = { cron = "0 30 2 * * *", timezone = "America/New_York" }
shards   = { range = { from = 1, to = 336776 }, count = 32 }
handler  = { sql = "INSERT INTO unmatched SELECT 1", chunk = 1000 }
tier     = "core"
timeout  = "30m"
retry    = { attempts = 3, first = "10s", factor = 2.0, max = "10m", jitter = 0.2 }
overlap  = "skip"
misfire  = { policy = "fire_once", grace = "1h" }

[job.hello]
handler = { exec = ["echo", "hello"] }
timeout = "none"
"#;

    #[test]
    fn a_good_file_is_read() {
        let jobs = parse(GOOD).unwrap();
        assert_eq!(jobs.len(), 2);
        let hello = &jobs[0];
        assert_eq!((hello.name.as_str(), hello.timeout), ("hello", Timeout::Never));
        assert_eq!(hello.handler, HandlerSpec::exec(["echo", "hello"]));
        let flights = &jobs[1];
        assert_eq!(flights.misfire.grace, Span::mins(60));
        assert_eq!((flights.misfire.policy, flights.overlap), (Misfire::FireOnce, OverlapPolicy::Skip));
        let again: JobSpec = serde_json::from_str(&flights.canonical_json()).unwrap();
        assert_eq!(&again, flights, "what the ledger keeps is what was read");
    }

    fn fault(from: &str, to: &str) -> JobFileError {
        assert!(GOOD.contains(from), "{from}");
        parse(&GOOD.replace(from, to)).expect_err(to)
    }

    #[test]
    fn faults_name_line_job_key_and_remedy() {
        for (from, to, line, words) in [
            ("tier ", "teir ", 6, "teir"),
            ("\"30m\"", "30", 7, "duration in quotes"),
            ("\"30m\"", "\"0s\"", 7, "none"),
            ("\"30m\"", "\"-1s\"", 7, "duration"),
            ("attempts = 3", "attempts = 0", 8, "retry.attempts"),
            ("max = \"10m\"", "max = \"1s\"", 8, "less than first"),
            ("count = 32", "count = 0", 4, "shards.count"),
            ("336776 }, count = 32", "9336776 }, count = 1000001", 4, "1000000 is the most"),
            ("America/New_York", "Mars/Phobos", 3, "Mars/Phobos"),
            ("0 30 2 * * *", "0 61 2 * * *", 3, "schedule"),
            ("\"skip\"", "\"skipp\"", 9, "skip"),
            ("\"core\"", "\"Core\"", 6, "lower-case"),
            ("exec = [\"echo\", \"hello\"]", "exec = []", 13, "program"),
            ("tier     = \"core\"", "name     = \"other\"", 6, "leave the key out"),
        ] {
            let e = fault(from, to);
            assert_eq!(e.line, line, "{to}: {e}");
            assert!(e.to_string().contains(words), "{to}: {e}");
            assert!(e.to_string().contains("job '"), "{to}: {e}");
        }
    }

    #[test]
    fn faults_within_a_handler_name_their_line() {
        let text = "[job.a]\nhandler.exec = { run = [\"x\"], env = {\n  PATH = \"/y\",\n} }\n[job.b.handler.http]\n\
                    url = \"nowhere\"\ntimeout = \"9s\"\n[job.b.handler.http.headers]\nX-A = \"a\"\nCookie = \"s3cret\"\n";
        let file = read(text, &|_| Err("none".into()));
        let found: Vec<(usize, bool)> = file.faults.iter().map(|f| (f.line, f.message.contains("handler."))).collect();
        assert_eq!(found, [(3, true), (6, true), (10, true)], "{:#?}", file.faults);
        assert!(!format!("{:?}", file.faults).contains("s3cret"), "{:?}", file.faults);
    }

    #[test]
    fn a_circle_of_jobs_is_refused_with_its_line() {
        let text = "[job.a]\nhandler = { rust = \"x\" }\nafter = [\"b\"]\n[job.b]\nhandler = { rust = \"x\" }\nafter = [\"a\"]\n";
        let fault = parse(text).unwrap_err();
        assert_eq!(fault.line, 3);
        assert!(fault.message.contains("a → b → a"), "{fault}");
    }

    #[test]
    fn all_faults_of_a_file_are_found_at_once() {
        let text = r#"
extra = 1

[job.one]
handler = { rust = "noop" }
timeout = 30
retry   = { attempts = 0, factor = 0.5 }
teir    = "core"

[job.two]
schedule = { cron = "0 61 * * *" }

[job.three]
schedule = { cron = "0 61 2 * * *" }
handler  = { rust = "noop" }
tier     = "Core"

[job.good]
handler = { rust = "noop" }
"#;
        let file = read(text, &|_| Err("none".into()));
        let lines: Vec<(usize, &str)> = file
            .faults
            .iter()
            .map(|f| (f.line, f.message.split([':', ';', ',']).nth(1).unwrap_or(&f.message).trim()))
            .collect();
        let found: Vec<usize> = lines.iter().map(|(line, _)| *line).collect();
        assert_eq!(found, [2, 6, 7, 7, 8, 10, 14, 16], "{:#?}", file.faults);
        assert_eq!(file.jobs.iter().map(|j| j.spec.name.as_str()).collect::<Vec<_>>(), ["good"]);
        assert!(file.faults[5].message.contains("missing field `handler`"), "{:?}", file.faults[5]);
        let many = (0..200).map(|n| format!("[job.j{n}]\nhandler = 1\n")).collect::<String>();
        assert_eq!(read(&many, &|_| Err("none".into())).faults.len(), FAULTS_OF_FILE);
    }

    #[test]
    fn calendars_are_frozen_into_the_job() {
        let text = "[job.a]\nhandler = { rust = \"noop\" }\n\
                    schedule = { cron = \"@daily\", except = [\"calendar: holidays.txt\"] }\n";
        let file = read(text, &|name| {
            assert_eq!(name, "holidays.txt");
            Ok("# Germany\n2026-12-25  Christmas Day\n\n2026-12-31..2027-01-01 # turn of the year\n".into())
        });
        assert_eq!(file.faults, []);
        let spec = &file.jobs[0].spec;
        let again: JobSpec = serde_json::from_str(&spec.canonical_json()).unwrap();
        let calendars = again.schedule.unwrap().calendars;
        assert_eq!(calendars["holidays.txt"], ["2026-12-25 Christmas Day", "2026-12-31..2027-01-01"]);
        let bad = read(text, &|_| Ok("2026-12-25\n25.12.2026\n".into()));
        assert_eq!(bad.faults[0].line, 3);
        assert!(bad.faults[0].message.contains("holidays.txt, line 2: '25.12.2026' is not a day"), "{:?}", bad.faults);
        let none = read(text, &|name| Err(format!("{name} can't be read")));
        assert!(none.faults[0].message.contains("can't be read"), "{:?}", none.faults);
        assert!(parse(text).is_err());
    }

    #[test]
    fn an_empty_file_says_how_to_begin() {
        assert!(parse("").unwrap_err().message.contains("[job.its-name]"));
    }
}
