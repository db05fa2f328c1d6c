//! Job files on disk: one file, or all `*.toml` of a directory, with the calendars next to them.

use crate::commands::Misuse;
use anyhow::Result;
use shardcron_domain::JobSpec;
use shardcron_domain::jobfile::{self, Placed};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A file is read whole; the largest sensible one, of a hundred thousand jobs, is smaller.
const FILE_BYTES: u64 = 64 * 1024 * 1024;
/// Files of a directory.
const FILES_MAX: usize = 10_000;

/// The jobs of a file or a directory, without a fault among them.
pub struct Loaded {
    /// By name.
    pub jobs: Vec<Found>,
}

/// A job and the file that it stands in.
pub struct Found {
    pub placed: Placed,
    pub file: PathBuf,
}

impl Loaded {
    pub fn into_specs(self) -> Vec<JobSpec> {
        self.jobs.into_iter().map(|found| found.placed.spec).collect()
    }
}

/// Reads a job file, a directory of them, or `-` for standard input. Every fault is told, as misuse, with file and line.
pub fn load(path: &Path) -> Result<Loaded> {
    let mut faults = Vec::new();
    let mut jobs: BTreeMap<String, Found> = BTreeMap::new();
    for file in files_of(path)? {
        let text = read_text(&file)?;
        let folder = file.parent().unwrap_or(Path::new("")).to_path_buf();
        let read = jobfile::read(&text, &|name| {
            let path = folder.join(name);
            read_text(&path).map_err(|e| format!("calendar: {e}"))
        });
        faults.extend(read.faults.iter().map(|fault| format!("{}, {fault}", file.display())));
        for placed in read.jobs {
            let name = placed.spec.name.clone();
            if let Some(first) = jobs.get(&name) {
                faults.push(format!(
                    "{}, line {}: job '{name}' is in {}, line {}, too; give one of them another name",
                    file.display(),
                    placed.line,
                    first.file.display(),
                    first.placed.line
                ));
            } else {
                jobs.insert(name, Found { placed, file: file.clone() });
            }
        }
    }
    if faults.is_empty() {
        Ok(Loaded { jobs: jobs.into_values().collect() })
    } else {
        Err(Misuse(faults.join("\n")).into())
    }
}

fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let cant = |e: std::io::Error| Misuse(format!("{} can't be read: {e}", path.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(cant)? {
        let file = entry.map_err(cant)?.path();
        if file.extension().is_some_and(|e| e == "toml") && file.is_file() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(Misuse(format!("there is no *.toml in {}", path.display())).into());
    }
    if files.len() > FILES_MAX {
        return Err(Misuse(format!("{} has {} files; {FILES_MAX} are possible", path.display(), files.len())).into());
    }
    files.sort();
    Ok(files)
}

/// A text file, or standard input for `-`.
pub fn read_text(path: &Path) -> Result<String, Misuse> {
    let cant = |e: std::io::Error| Misuse(format!("{} can't be read: {e}", path.display()));
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().take(FILE_BYTES + 1).read_to_string(&mut text)
    } else {
        let file = std::fs::File::open(path).map_err(cant)?;
        file.take(FILE_BYTES + 1).read_to_string(&mut text)
    };
    if read.map_err(cant)? as u64 > FILE_BYTES {
        return Err(Misuse(format!("{} is larger than {FILE_BYTES} bytes", path.display())));
    }
    Ok(text)
}
