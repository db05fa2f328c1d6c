//! The matrix as text, as JSON, and as a section of a document.

use super::cell::Outcome;
use super::matrix::{Cell, Measure, Rule};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// A cell over all of its runs: the worst of each figure.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which.
    pub cell: Cell,
    rule: Rule,
    runs: u64,
    green: u64,
    recovered: Vec<Duration>,
    latest_firing: Duration,
    quiet: Duration,
    shards: u64,
    firings: u64,
    lost: u64,
    recorded_twice: u64,
    missed: u64,
    doubled: u64,
    taken_over: u64,
    refused: u64,
}

/// A cell as programs read it. The names up to `ok` are relied on from outside.
#[derive(Debug, Serialize)]
pub struct Answer {
    part: String,
    fault: String,
    bound_seconds: f64,
    /// The worst run; null: in one of them it did not recover.
    recovered_seconds: Option<f64>,
    lost: u64,
    recorded_twice: u64,
    firings_missed: u64,
    firings_doubled: u64,
    ok: bool,
    runs: u64,
    runs_ok: u64,
    recovered_median_seconds: Option<f64>,
    latest_firing_seconds: f64,
    quiet_seconds: f64,
    shards: u64,
    firings: u64,
    taken_over: u64,
    late_ends_refused: u64,
}

fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 100.0).round() / 100.0
}

impl Row {
    /// No run yet.
    pub fn new(cell: Cell, rule: Rule) -> Self {
        Row {
            cell,
            rule,
            runs: 0,
            green: 0,
            recovered: Vec::new(),
            latest_firing: Duration::ZERO,
            quiet: Duration::ZERO,
            shards: 0,
            firings: 0,
            lost: 0,
            recorded_twice: 0,
            missed: 0,
            doubled: 0,
            taken_over: 0,
            refused: 0,
        }
    }

    /// One more run. Counts are added up; of times the longest counts.
    pub fn add(&mut self, outcome: &Outcome) {
        self.runs += 1;
        self.green += u64::from(outcome.ok());
        self.recovered.extend(outcome.recovered);
        self.recovered.sort_unstable();
        self.latest_firing = self.latest_firing.max(outcome.latest_firing);
        self.quiet = self.quiet.max(outcome.quiet);
        self.shards += outcome.tally.shards;
        self.firings += outcome.tally.firings;
        self.lost += outcome.tally.lost;
        self.recorded_twice += outcome.tally.recorded_twice;
        self.missed += outcome.tally.firings_missed;
        self.doubled += outcome.tally.firings_doubled;
        self.taken_over += outcome.tally.taken_over;
        self.refused += outcome.late_ends_refused;
    }

    /// Every run was green, and there was one.
    pub fn ok(&self) -> bool {
        self.runs > 0 && self.green == self.runs
    }

    fn worst(&self) -> Option<Duration> {
        self.recovered.last().copied().filter(|_| self.recovered.len() as u64 == self.runs)
    }

    fn median(&self) -> Option<Duration> {
        self.recovered.get(self.recovered.len() / 2).copied()
    }

    /// For programs.
    pub fn answer(&self) -> Answer {
        Answer {
            part: self.cell.part.to_string(),
            fault: self.cell.fault.to_string(),
            bound_seconds: seconds(self.rule.bound),
            recovered_seconds: self.worst().map(seconds),
            lost: self.lost,
            recorded_twice: self.recorded_twice,
            firings_missed: self.missed,
            firings_doubled: self.doubled,
            ok: self.ok(),
            runs: self.runs,
            runs_ok: self.green,
            recovered_median_seconds: self.median().map(seconds),
            latest_firing_seconds: seconds(self.latest_firing),
            quiet_seconds: seconds(self.quiet),
            shards: self.shards,
            firings: self.firings,
            taken_over: self.taken_over,
            late_ends_refused: self.refused,
        }
    }

    fn cells(&self) -> [String; 9] {
        let time = |time: Option<Duration>| time.map_or_else(|| "never".into(), |t| format!("{:.2}", t.as_secs_f64()));
        [
            self.cell.to_string(),
            measured(self.rule.measure).into(),
            format!("{}", self.rule.bound.as_secs()),
            time(self.median()),
            time(self.worst()),
            format!("{}/{}", self.green, self.runs),
            format!("{} of {}", self.lost, self.shards),
            format!("{}", self.recorded_twice),
            format!("{}, {} of {}", self.missed, self.doubled, self.firings),
        ]
    }
}

const HEADS: [&str; 9] = [
    "cell",
    "measured",
    "bound s",
    "median s",
    "worst s",
    "green",
    "lost, of shards",
    "twice",
    "firings missed, doubled",
];

fn measured(measure: Measure) -> &'static str {
    match measure {
        Measure::Firing => "latest firing after the fault",
        Measure::Shards => "its shards elsewhere",
        Measure::Recorded => "its shards recorded after the return",
        Measure::Return => "work after the return",
    }
}

/// Aligned columns for people.
pub fn text(rows: &[Row]) -> String {
    let lines: Vec<[String; 9]> =
        std::iter::once(HEADS.map(str::to_owned)).chain(rows.iter().map(Row::cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADS.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let padded: Vec<String> = line.iter().zip(&widths).map(|(word, width)| format!("{word:<width$}")).collect();
        text += padded.join("  ").trim_end();
        text.push('\n');
    }
    let red: Vec<String> = rows.iter().filter(|row| !row.ok()).map(|row| row.cell.to_string()).collect();
    if red.is_empty() {
        text += "all green\n";
    } else {
        let _ = writeln!(text, "not green: {}", red.join(", "));
    }
    text
}

const BEGIN: &str = "<!-- matrix: written by loadtest faults --write; do not edit -->";
const END: &str = "<!-- end of matrix -->";

/// The section of the document: a row for each cell, with the command that repeats it and the reason of its bound.
fn markdown(rows: &[Row], fast: bool) -> String {
    let mut text = String::new();
    let flag = if fast { " --fast" } else { "" };
    let _ = writeln!(text, "| {} |", HEADS.join(" | "));
    let _ = writeln!(text, "|{}", " --- |".repeat(HEADS.len()));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.cells().join(" | "));
    }
    let _ = writeln!(text, "\nWhy each bound, and the command that repeats the row:\n");
    let _ = writeln!(text, "| cell | why | command, after `cargo run --release -p loadtest --` |");
    let _ = writeln!(text, "| --- | --- | --- |");
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {} | `faults{flag} --cell {} --runs {}` |",
            row.cell, row.rule.why, row.cell, row.runs
        );
    }
    text
}

/// Puts the table between the markers of a document.
///
/// # Errors
/// The file can't be read or written, or has no markers.
pub async fn write(file: &Path, rows: &[Row], fast: bool) -> Result<()> {
    let name = file.display();
    let old = tokio::fs::read_to_string(file).await.with_context(|| format!("{name} can't be read"))?;
    let new = between(&old, &markdown(rows, fast)).with_context(|| format!("{name}"))?;
    tokio::fs::write(file, new).await.with_context(|| format!("{name} can't be written"))
}

fn between(old: &str, section: &str) -> Result<String> {
    let (Some(begin), Some(end)) = (old.find(BEGIN), old.find(END)) else {
        bail!("it needs the line '{BEGIN}' and, below it, '{END}'");
    };
    if end < begin {
        bail!("its markers are in the wrong order");
    }
    Ok(format!("{}{BEGIN}\n\n{section}\n{}", &old[..begin], &old[end..]))
}

#[cfg(test)]
mod tests {
    use super::super::matrix::Timings;
    use super::*;

    fn row(times: &[Option<u64>]) -> Row {
        let cell: Cell = "leader/killed".parse().unwrap();
        let mut row = Row::new(cell, cell.rule(Timings::DEFAULT));
        for time in times {
            let mut outcome = Outcome::new(cell, row.rule);
            outcome.recovered = time.map(Duration::from_millis);
            outcome.tally.lost = u64::from(time.is_none());
            if time.is_none() {
                outcome.problems.push("it did not recover".into());
            }
            row.add(&outcome);
        }
        row
    }

    #[test]
    fn the_names_that_are_relied_on() {
        let value = serde_json::to_value(row(&[Some(1_500), Some(4_250)]).answer()).unwrap();
        for (name, want) in [
            ("part", serde_json::json!("leader")),
            ("fault", "killed".into()),
            ("bound_seconds", 6.0.into()),
            ("recovered_seconds", 4.25.into()),
            ("lost", 0.into()),
            ("recorded_twice", 0.into()),
            ("firings_missed", 0.into()),
            ("firings_doubled", 0.into()),
            ("ok", true.into()),
        ] {
            assert_eq!(value[name], want, "{name}");
        }
    }

    #[test]
    fn one_red_run_makes_the_cell_red() {
        let red = row(&[Some(1_500), None]);
        assert!(!red.ok());
        let value = serde_json::to_value(red.answer()).unwrap();
        assert_eq!((&value["ok"], &value["recovered_seconds"]), (&false.into(), &serde_json::Value::Null));
        assert!(!row(&[]).ok(), "no run shows nothing");
        assert!(text(&[red]).contains("not green: leader/killed"));
    }

    #[test]
    fn the_section_is_put_between_the_markers() {
        let old = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let new = between(&old, "| new |").unwrap();
        assert!(new.starts_with("before\n") && new.ends_with("after\n") && new.contains("| new |"), "{new}");
        assert!(!new.contains("old"));
        assert_eq!(between(&new, "| new |").unwrap(), new, "again makes no difference");
        assert!(between("no markers", "").is_err());
    }
}
