//! Crontabs as cronie and Debian's cron read them (`crontab(5)`).

use super::{Imported, Names, comment, key, quoted, refusal};
use crate::schedule::ScheduleSpec;
use std::collections::BTreeMap;

const HEAD: &str =
    "From a crontab. Each job is as cron ran it: it may overlap itself, is not made up for when it was missed, has no
time limit and one try. Take out a line to have Shardcron's default for it (skip, fire_once, 30m, 3 tries).

Commands run by the shell on whichever worker takes them, as the worker's user and in its folder, not in a user's
home. Their worker must allow the shell (worker.allow_exec), and with it allows every command of every job file.";

/// What one line of a crontab may be.
enum Line<'t> {
    Nothing,
    Variable(&'t str, String),
    Job { when: &'t str, rest: &'t str },
    Strange,
}

/// Variables as they stand at a line; later lines may change them.
type Variables = BTreeMap<String, String>;

/// Makes a job file of a crontab. With `system`, a user stands before each command, as in `/etc/crontab`.
#[must_use]
pub fn crontab(text: &str, system: bool) -> Imported {
    let mut imported = Imported::default();
    comment(&mut imported.text, HEAD);
    let (mut names, mut variables) = (Names::default(), Variables::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        match read(line) {
            Line::Nothing => {}
            Line::Variable(name, value) => {
                variables.insert(name.to_owned(), value);
            }
            Line::Job { when, rest } => match job(when, rest, system, &variables) {
                Ok(job) => job.write(&mut imported, &mut names, (number, line)),
                Err(why) => leave_out(&mut imported, number, line, &why),
            },
            Line::Strange => leave_out(&mut imported, number, line, "it is neither a variable nor a job"),
        }
    }
    imported
}

fn leave_out(imported: &mut Imported, number: usize, line: &str, why: &str) {
    imported.text.push('\n');
    comment(&mut imported.text, &format!("Not carried over, line {number}: {why}\n  {line}"));
    imported.left_out.push(format!("line {number}: {why}: {line}"));
}

fn read(line: &str) -> Line<'_> {
    if line.is_empty() || line.starts_with('#') {
        return Line::Nothing;
    }
    if let Some((name, value)) = line.split_once('=') {
        let name = unquoted(name.trim());
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if !name.is_empty() && name.chars().all(word) && !name.starts_with(|c: char| c.is_ascii_digit()) {
            return Line::Variable(name, unquoted(value.trim()).to_owned());
        }
    }
    // cronie: no log entry for the job.
    let line = line.strip_prefix('-').unwrap_or(line);
    let fields = if line.starts_with('@') { 1 } else { 5 };
    let mut rest = line;
    for _ in 0..fields {
        let Some(at) = rest.find(char::is_whitespace) else { return Line::Strange };
        rest = rest[at..].trim_start();
    }
    let when = line[..line.len() - rest.len()].trim_end();
    if rest.is_empty() { Line::Strange } else { Line::Job { when, rest } }
}

fn unquoted(text: &str) -> &str {
    let inner = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).unwrap_or(text)
}

/// A job as it is to be written.
struct Job {
    schedule: String,
    shell: String,
    script: String,
    name: String,
    remarks: Vec<String>,
}

fn job(when: &str, rest: &str, system: bool, variables: &Variables) -> Result<Job, String> {
    let mut remarks = Vec::new();
    let mut command = rest;
    if system {
        let Some((user, after)) = rest.split_once(char::is_whitespace) else {
            return Err("there is no command behind the user".into());
        };
        remarks.push(format!("Ran as user '{user}'; here it runs as the worker's user."));
        command = after.trim_start();
    }
    let schedule = schedule(when, variables, &mut remarks)?;
    let (command, input) = split_percent(command);
    let name = name_of(&command);
    let script = script(command, input, variables);
    if let Some(to) = variables.get("MAILTO").filter(|to| !to.is_empty()) {
        remarks.push(format!("Mailed its output to {to}; here the end of the output stands in the ledger."));
    }
    let shell = variables.get("SHELL").cloned().unwrap_or_else(|| "/bin/sh".into());
    Ok(Job { schedule, shell, script, name, remarks })
}

/// The schedule's table, checked; remarks on what has no counterpart.
fn schedule(when: &str, variables: &Variables, remarks: &mut Vec<String>) -> Result<String, String> {
    let pattern = when.split_whitespace().collect::<Vec<_>>().join(" ");
    if pattern.eq_ignore_ascii_case("@reboot") {
        return Err("@reboot has no meaning in a cluster, which never boots as a whole".into());
    }
    let mut text = format!("cron = {}", quoted(&pattern));
    let spec = |timezone| ScheduleSpec { cron: Some(pattern.clone()), timezone, ..ScheduleSpec::default() };
    spec(None).compile().map_err(|e| e.to_string())?;
    match variables.get("CRON_TZ") {
        Some(zone) => match spec(Some(zone.clone())).compile() {
            Ok(_) => text += &format!(", timezone = {}", quoted(zone)),
            Err(e) => remarks.push(format!("CRON_TZ was not carried over: {e}.")),
        },
        None => remarks.push("Without CRON_TZ, cron read the pattern in the host's zone; here it is UTC.".into()),
    }
    if let Some(delay) = variables.get("RANDOM_DELAY") {
        match delay.parse::<u32>() {
            Ok(0) => {}
            Ok(minutes) => text += &format!(", jitter = \"{minutes}m\""),
            Err(_) => remarks.push(format!("RANDOM_DELAY = {delay} was not carried over: it is no number of minutes.")),
        }
    }
    match refusal(&format!("schedule = {{ {text} }}")) {
        Some(why) => Err(why),
        None => Ok(text),
    }
}

/// The command, and its standard input if there is a `%` that no `\` stands before.
fn split_percent(text: &str) -> (String, Option<String>) {
    let (mut command, mut input) = (String::new(), None::<String>);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let escaped = c == '\\' && chars.peek() == Some(&'%');
        let c = if escaped { chars.next().unwrap_or(c) } else { c };
        match (&mut input, c) {
            (None, '%') if !escaped => input = Some(String::new()),
            (Some(input), '%') if !escaped => input.push('\n'),
            (Some(input), c) => input.push(c),
            (None, c) => command.push(c),
        }
    }
    (command, input)
}

/// What the shell gets: the crontab's variables, and the input in front of the command.
fn script(command: String, input: Option<String>, variables: &Variables) -> String {
    // These are cron's own; the last two can't be set in a crontab.
    let own = ["SHELL", "MAILTO", "MAILFROM", "CRON_TZ", "RANDOM_DELAY", "CONTENT_TYPE", "LOGNAME", "USER"];
    let mut script = String::new();
    for (name, value) in variables.iter().filter(|(name, _)| !own.contains(&name.as_str())) {
        script += &format!("export {name}={}; ", single_quoted(value));
    }
    match input {
        // The command in lines of its own: it may end in a comment.
        Some(input) => script + &format!("printf '%s\\n' {} | (\n{command}\n)", single_quoted(&input)),
        None => script + &command,
    }
}

fn single_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// A name out of the program that does the work.
fn name_of(command: &str) -> String {
    const BEFORE: [&str; 12] =
        ["sudo", "nice", "ionice", "exec", "env", "nohup", "time", "timeout", "flock", "chronic", "test", "["];
    const INTERPRETERS: [&str; 9] = ["sh", "bash", "python", "python3", "perl", "php", "ruby", "node", "java"];
    let part = command.split("&&").map(str::trim).find(|part| {
        let first = part.split_whitespace().next().unwrap_or_default();
        !matches!(first, "cd" | "test" | "[" | "." | "source") && !part.is_empty()
    });
    let mut last = "";
    for word in part.unwrap_or(command).split_whitespace() {
        let word = word.trim_matches(['"', '\'', '(', ')', ';']);
        let base = word.rsplit('/').next().unwrap_or_default();
        let skipped = word.starts_with('-') || word.contains('=') || base.is_empty();
        if skipped || BEFORE.contains(&base) || base.chars().all(|c| c.is_ascii_digit()) {
            continue;
        }
        last = base;
        if !INTERPRETERS.contains(&base) {
            break;
        }
    }
    let stem = [".sh", ".py", ".pl", ".php", ".rb", ".js", ".jar"].iter().find_map(|end| last.strip_suffix(end));
    stem.filter(|stem| !stem.is_empty()).unwrap_or(last).to_owned()
}

impl Job {
    fn write(self, imported: &mut Imported, names: &mut Names, (number, line): (usize, &str)) {
        let out = &mut imported.text;
        out.push('\n');
        comment(out, &format!("Line {number}: {line}"));
        for remark in &self.remarks {
            comment(out, remark);
        }
        let name = names.take(&self.name, "cron");
        out.push_str(&format!("[job.{}]\n", quoted(&name)));
        key(out, "schedule", &format!("{{ {} }}", self.schedule));
        key(out, "handler", &format!("{{ exec = [{}, \"-c\", {}] }}", quoted(&self.shell), quoted(&self.script)));
        key(out, "overlap", "\"allow\"");
        key(out, "misfire", "{ policy = \"skip\" }");
        key(out, "timeout", "\"none\"");
        key(out, "retry", "{ attempts = 1 }");
        imported.jobs += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{HandlerSpec, JobSpec, OverlapPolicy, Timeout};
    use crate::jobfile;

    const TAB: &str = r#"# m h dom mon dow command
SHELL=/bin/bash
PATH = "/usr/local/bin:/usr/bin"
MAILTO=ops@example.org
*/15 * * * *   /usr/local/bin/poll.sh --fast >/dev/null 2>&1
@reboot /usr/local/bin/start
CRON_TZ=America/New_York
30 2 * * MON-fri cd /srv/app && python3 manage.py nightly
0 4 1,15 * sun   mail -s "it's time" root%first line%100\% done
5 22-2 * * * /bin/wraps
0 5 * * 5-7 /usr/local/bin/poll.sh
@daily report # with a comment
not a line
61 * * * * /bin/late
CRON_TZ=Mars/Phobos
-0 0 * * * quiet
"#;

    fn jobs(text: &str) -> Vec<JobSpec> {
        jobfile::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    fn script(job: &JobSpec) -> &str {
        let HandlerSpec::Exec { argv, .. } = &job.handler else { panic!("{job:?}") };
        assert_eq!(argv[1], "-c");
        &argv[2]
    }

    #[test]
    fn a_crontab_becomes_a_job_file_that_is_valid() {
        let imported = crontab(TAB, false);
        let jobs = jobs(&imported.text);
        let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(names, ["mail", "manage", "poll", "poll-2", "quiet", "report"]);
        assert_eq!((imported.jobs, imported.left_out.len()), (6, 4));
        let by = |name: &str| jobs.iter().find(|job| job.name == name).unwrap();
        let poll = by("poll");
        assert_eq!(poll.schedule.as_ref().unwrap().timezone, None, "CRON_TZ stands below it");
        assert_eq!(
            script(poll),
            "export PATH='/usr/local/bin:/usr/bin'; /usr/local/bin/poll.sh --fast >/dev/null 2>&1"
        );
        assert!(matches!(&poll.handler, HandlerSpec::Exec { argv, .. } if argv[0] == "/bin/bash"));
        assert_eq!((poll.overlap, poll.timeout, poll.retry.attempts), (OverlapPolicy::Allow, Timeout::Never, 1));
        assert_eq!(by("manage").schedule.as_ref().unwrap().timezone.as_deref(), Some("America/New_York"));
        assert!(
            script(by("mail")).ends_with("printf '%s\\n' 'first line\n100% done' | (\nmail -s \"it's time\" root\n)")
        );
        assert!(script(by("report")).ends_with("report # with a comment"));
        assert_eq!(by("quiet").schedule.as_ref().unwrap().timezone, None);
    }

    #[test]
    fn what_is_not_carried_over_stands_beside_its_line() {
        let imported = crontab(TAB, false);
        for (line, why) in
            [("line 6", "@reboot"), ("line 10", "22-2"), ("line 13", "neither"), ("line 14", "61 is not from 0 to 59")]
        {
            let told = imported.left_out.iter().find(|l| l.starts_with(line)).unwrap_or_else(|| panic!("{line}"));
            assert!(told.contains(why), "{told}");
        }
        for words in
            ["#   @reboot /usr/local/bin/start", "Mailed its output to ops@example.org", "CRON_TZ was not carried over"]
        {
            assert!(imported.text.contains(words), "{words}: {}", imported.text);
        }
    }

    #[test]
    fn a_system_crontab_has_a_user() {
        let tab = "17 * * * * root cd / && run-parts --report /etc/cron.hourly\n25 6 * * * root\nRANDOM_DELAY=30\n@weekly www-data /x/clean.py\n";
        let imported = crontab(tab, true);
        let jobs = jobs(&imported.text);
        assert_eq!(jobs.iter().map(|j| j.name.as_str()).collect::<Vec<_>>(), ["clean", "run-parts"]);
        assert!(script(&jobs[1]).ends_with("cd / && run-parts --report /etc/cron.hourly"));
        assert!(imported.text.contains("Ran as user 'www-data'"));
        assert_eq!(jobs[0].schedule.as_ref().unwrap().jitter, Some(crate::units::Span::mins(30)));
        assert_eq!(imported.left_out.len(), 1, "{:?}", imported.left_out);
    }

    #[test]
    fn any_text_makes_a_file_that_is_valid() {
        for text in [
            "",
            "%",
            "* * * * * %",
            "* * * * * \\%%\\",
            "=",
            "\u{0}* * * * * \u{1}'\"",
            "@ x",
            "@daily \u{2028}",
            "* * * * *  ",
        ] {
            for system in [false, true] {
                let imported = crontab(text, system);
                if imported.jobs > 0 {
                    assert_eq!(jobs(&imported.text).len(), imported.jobs, "{text:?}");
                } else {
                    let _: toml::Table = toml::from_str(&imported.text).unwrap();
                }
            }
        }
    }
}
