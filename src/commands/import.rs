//! `shardcron import …`: writes a job file of what another scheduler keeps. Needs no service.

use super::Misuse;
use super::jobs::files::read_text;
use crate::output::{Out, line};
use anyhow::{Context, Result};
use clap::Subcommand;
use serde_json::json;
use shardcron_domain::import::{self, Imported};
use shardcron_domain::jobfile;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The sub-commands.
#[derive(Subcommand)]
pub enum ImportCommand {
    /// Make a job file of a crontab
    #[command(
        after_help = "What could not be carried over stands in the file as a comment beside its line.\n\nExamples:\n  \
                            crontab -l | shardcron import crontab - > jobs.toml\n  \
                            shardcron import crontab /etc/crontab --system --output jobs.toml"
    )]
    Crontab {
        /// The crontab; - is standard input
        file: PathBuf,
        /// A user stands before each command, as in /etc/crontab and /etc/cron.d
        #[arg(long)]
        system: bool,
        /// Write the job file here, instead of to standard output; an existing file is not replaced
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Make a job file of a MySQL dump of XXL-JOB's table xxl_job_info
    #[command(after_help = "Example:\n  mysqldump xxl_job xxl_job_info xxl_job_group > dump.sql\n  \
                            shardcron import xxl-job dump.sql --timezone Asia/Shanghai --output jobs.toml")]
    XxlJob {
        /// The dump; - is standard input
        dump: PathBuf,
        /// The zone of XXL-JOB's server, in which it reads patterns
        #[arg(long, value_name = "ZONE")]
        timezone: Option<String>,
        /// Write the job file here, instead of to standard output; an existing file is not replaced
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// Runs one.
pub fn run(command: ImportCommand, out: Out) -> Result<ExitCode> {
    match command {
        ImportCommand::Crontab { file, system, output } => {
            write(&import::crontab(&read_text(&file)?, system), output.as_deref(), out)
        }
        ImportCommand::XxlJob { dump, timezone, output } => {
            let text = read_text(&dump)?;
            let imported = import::xxl_job(&text, timezone.as_deref())
                .map_err(|why| Misuse(format!("{}: {why}", dump.display())))?;
            write(&imported, output.as_deref(), out)
        }
    }
}

fn write(imported: &Imported, output: Option<&Path>, out: Out) -> Result<ExitCode> {
    if imported.jobs > 0 {
        // Should it not be valid, nobody must find out by applying it.
        let read = jobfile::parse(&imported.text);
        read.map_err(|e| anyhow::anyhow!("the job file that was made is not valid ({e}); please report this"))?;
    }
    if let Some(path) = output {
        let mut file = std::fs::File::create_new(path).with_context(|| format!("{} can't be made", path.display()))?;
        std::io::Write::write_all(&mut file, imported.text.as_bytes())
            .with_context(|| format!("{} can't be written", path.display()))?;
    }
    let text = output.is_none().then_some(&imported.text);
    out.answer(&json!({ "jobs": imported.jobs, "left_out": imported.left_out, "text": text }), || {
        if let Some(text) = text {
            line(text.trim_end());
        }
    });
    if !out.json {
        // Standard output may be the file itself.
        eprintln!("{} carried over, {} not (see the comments)", imported.jobs, imported.left_out.len());
        imported.left_out.iter().for_each(|why| eprintln!("  {why}"));
    }
    Ok(ExitCode::SUCCESS)
}
