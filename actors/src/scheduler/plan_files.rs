//! Looks at files to cut them: sizes, times, and where records end. Blocking; runs on a thread for that.

use shardcron_domain::file_beginning::{BEGINNING_BYTES, Beginning};
use shardcron_domain::limits::FILES_MAX;
use shardcron_domain::plan::{PlannedFile, ShardPlan};
use shardcron_domain::planning::{NoPlan, of_files};
use shardcron_domain::record_ends::{COMMA, Cutter, FileFormat, RecordEnds, not_a_comma, share_parts};
use shardcron_domain::sharding::FileSpec;
use std::fs::{File, Metadata};
use std::io::{Read, Seek, SeekFrom};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::UNIX_EPOCH;

const BUFFER_BYTES: usize = 1024 * 1024;

/// The plan of the files of a specification, as they are now.
pub(super) fn plan(spec: &FileSpec, given_up: &AtomicBool) -> Result<ShardPlan, NoPlan> {
    let paths = paths(spec)?;
    let files = paths.into_iter().map(look).collect::<Result<Vec<_>, NoPlan>>()?;
    let sizes: Vec<u64> = files.iter().map(|file| file.size).collect();
    let parts: Vec<u32> = match spec.size {
        Some(size) => sizes.iter().map(|s| u32::try_from(s.div_ceil(size.max(1))).unwrap_or(u32::MAX)).collect(),
        None => share_parts(&sizes, spec.count.unwrap_or(1)),
    };
    let cut = |(file, parts): (PlannedFile, u32)| cut(file, spec, parts, given_up);
    of_files(spec.format, files.into_iter().zip(parts).map(cut).collect::<Result<_, _>>()?)
}

fn paths(spec: &FileSpec) -> Result<Vec<String>, NoPlan> {
    let Some(pattern) = &spec.glob else { return Ok(spec.path.iter().cloned().collect()) };
    let found = glob::glob(pattern).map_err(|e| NoPlan::invalid(format!("the pattern '{pattern}': {e}")))?;
    let mut paths = Vec::new();
    for path in found {
        let path = path.map_err(|e| NoPlan::invalid(format!("the pattern '{pattern}': {e}")))?;
        if path.is_dir() {
            continue;
        }
        let Some(text) = path.to_str() else {
            return Err(NoPlan::invalid(format!("'{}' has a name that is no UTF-8; rename it", path.display())));
        };
        if paths.len() >= FILES_MAX {
            return Err(NoPlan::invalid(format!("more than {FILES_MAX} files match '{pattern}'; use several jobs")));
        }
        paths.push(text.to_owned());
    }
    if paths.is_empty() {
        return Err(NoPlan::invalid(format!("no file matches '{pattern}' where the scheduler runs")));
    }
    // In the order of their bytes, whatever the pattern's own order is.
    paths.sort_unstable();
    Ok(paths)
}

fn unreadable(path: &str) -> impl Fn(std::io::Error) -> NoPlan + use<> {
    let path = path.to_owned();
    move |e| NoPlan::invalid(format!("{path} can't be read where the scheduler runs: {e}"))
}

fn modified_ms(metadata: &Metadata) -> i64 {
    let since = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn look(path: String) -> Result<PlannedFile, NoPlan> {
    let metadata = std::fs::metadata(&path).map_err(unreadable(&path))?;
    if !metadata.is_file() {
        return Err(NoPlan::invalid(format!(
            "{path} is no file; to take the files of a folder, use glob = \"{path}/*\""
        )));
    }
    Ok(PlannedFile { size: metadata.len(), modified_ms: modified_ms(&metadata), header: 0, path })
}

/// A file and the runs of bytes that it is cut into.
fn cut(
    mut file: PlannedFile,
    spec: &FileSpec,
    parts: u32,
    given_up: &AtomicBool,
) -> Result<(PlannedFile, Vec<(u64, u64)>), NoPlan> {
    let fault = unreadable(&file.path);
    let mut opened = File::open(&file.path).map_err(&fault)?;
    let mut beginning = Vec::new();
    opened.by_ref().take(BEGINNING_BYTES).read_to_end(&mut beginning).map_err(&fault)?;
    let first = match Beginning::of(&beginning) {
        Beginning::Text { from } => from,
        Beginning::NoText(what) => {
            return Err(NoPlan::invalid(format!(
                "{} is {what}, and such a file can't be read from its middle. Convert it to plain UTF-8 text first, or hand its name to \
                 a job of one shard",
                file.path
            )));
        }
    };
    opened.seek(SeekFrom::Start(first)).map_err(&fault)?;
    let mut scan = Scan { opened, at: first, size: file.size, buffer: vec![0; BUFFER_BYTES], given_up };
    let delimiter = spec.delimiter.and_then(|c| u8::try_from(c).ok());
    let mut ends = RecordEnds::new(spec.format, first).delimited_by(delimiter.unwrap_or(COMMA));
    if spec.format == FileFormat::Csv && delimiter.is_none() {
        check_for_commas(&mut scan, &file, first).map_err(&fault)??;
    }
    let mut from = first;
    let mut rest = Vec::new();
    if spec.header {
        from = file.size;
        while let Some(bytes) = scan.next().map_err(&fault)? {
            let mut seen: Vec<u64> = Vec::new();
            ends.feed(bytes, |end| seen.push(end));
            if let Some((end, more)) = seen.split_first() {
                (from, rest) = (*end, more.to_vec());
                break;
            }
        }
        file.header = from;
    }
    let mut cutter = Cutter::new(from, file.size, parts);
    rest.into_iter().for_each(|end| cutter.end(end));
    match spec.format {
        FileFormat::Csv => {
            while let Some(bytes) = scan.next().map_err(&fault)? {
                ends.feed(bytes, |end| cutter.end(end));
            }
            if ends.open_quote() {
                return Err(NoPlan::invalid(format!(
                    "{} ends inside a quoted field: a quote was opened and never closed. The file is cut off, or it is not CSV \
                     (format = \"lines\")",
                    file.path
                )));
            }
        }
        // A line's end can be looked for from anywhere.
        FileFormat::Lines => while_targets(&mut scan, &mut cutter).map_err(&fault)?,
    }
    let now = std::fs::metadata(&file.path).map_err(&fault)?;
    file.check(now.len(), modified_ms(&now)).map_err(NoPlan::invalid)?;
    Ok((file, cutter.parts()))
}

/// Refuses a file whose first record says that its fields are not between commas, and nobody said so. Looks at the first buffer of
/// it, and goes back to the beginning.
fn check_for_commas(scan: &mut Scan<'_>, file: &PlannedFile, first: u64) -> std::io::Result<Result<(), NoPlan>> {
    let Some(bytes) = scan.next()? else { return Ok(Ok(())) };
    let record = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if let Some(other) = not_a_comma(record) {
        let other = other.escape_default();
        return Ok(Err(NoPlan::invalid(format!(
            "the first record of {} has no ',' but '{other}' in it. Say delimiter = \"{other}\" beside format = \"csv\"; or \
             delimiter = \",\", if it has one column only",
            file.path
        ))));
    }
    scan.seek(first)?;
    Ok(Ok(()))
}

/// Seeks to each place where a cut should be, and reads on to the end of the line.
fn while_targets(scan: &mut Scan<'_>, cutter: &mut Cutter) -> std::io::Result<()> {
    while let Some(target) = cutter.target() {
        // The byte before it may be the line end that makes it a cut.
        scan.seek(target.saturating_sub(1))?;
        let mut ends = RecordEnds::new(FileFormat::Lines, scan.at);
        loop {
            let Some(bytes) = scan.next()? else { return Ok(()) };
            let mut moved = false;
            ends.feed(bytes, |end| {
                if !moved {
                    cutter.end(end);
                    moved = cutter.target() != Some(target);
                }
            });
            if moved {
                break;
            }
        }
    }
    Ok(())
}

/// The bytes of a file up to the size that it had.
struct Scan<'f> {
    opened: File,
    at: u64,
    size: u64,
    buffer: Vec<u8>,
    given_up: &'f AtomicBool,
}

impl Scan<'_> {
    fn seek(&mut self, to: u64) -> std::io::Result<()> {
        self.at = self.opened.seek(SeekFrom::Start(to))?;
        Ok(())
    }

    fn next(&mut self) -> std::io::Result<Option<&[u8]>> {
        if self.given_up.load(Ordering::Relaxed) {
            return Err(std::io::Error::other("the look at it was given up"));
        }
        let most = usize::try_from(self.size.saturating_sub(self.at)).unwrap_or(usize::MAX).min(self.buffer.len());
        if most == 0 {
            return Ok(None);
        }
        let read = loop {
            match self.opened.read(&mut self.buffer[..most]) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.at += read as u64;
        Ok((read > 0).then(|| &self.buffer[..read]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_domain::firing::DecisionKind;
    use shardcron_domain::plan::ShardSlice;

    fn spec(path: &std::path::Path, count: u32, format: FileFormat) -> FileSpec {
        FileSpec { path: Some(path.display().to_string()), count: Some(count), format, ..FileSpec::default() }
    }

    fn slices(plan: &ShardPlan) -> Vec<(String, u64, u64)> {
        let of = |index| match plan.slice(index) {
            Some(ShardSlice::File { file, from, to, .. }) => (file.path, from, to),
            other => panic!("{other:?}"),
        };
        (0..plan.count()).map(of).collect()
    }

    fn planned(spec: &FileSpec) -> Result<ShardPlan, NoPlan> {
        plan(spec, &AtomicBool::new(false))
    }

    #[test]
    fn a_csv_file_is_cut_at_its_records_and_its_header_is_in_no_shard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.csv");
        let row = |n: usize| format!("{n},\"two\nlines, \"\"{n}\"\"\"\r\n");
        let text = format!("\u{feff}id,\"te\nxt\"\n{}", (0..500).map(row).collect::<String>());
        std::fs::write(&path, &text).unwrap();
        let spec = FileSpec { header: true, ..spec(&path, 7, FileFormat::Csv) };
        let plan = planned(&spec).unwrap();
        assert_eq!(plan.count(), 7);
        let mut whole = String::new();
        for (_, from, to) in slices(&plan) {
            let part = &text[from as usize..to as usize];
            let mut records = csv::ReaderBuilder::new().has_headers(false).from_reader(part.as_bytes());
            assert!(records.records().all(|r| r.unwrap().len() == 2), "cut inside a record: {part}");
            whole.push_str(part);
        }
        assert_eq!(whole, text["\u{feff}id,\"te\nxt\"\n".len()..]);
    }

    #[test]
    fn lines_are_found_by_seeking_and_by_bytes_per_shard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.txt");
        let text: String = (0..1_000).map(|n| format!("line {n}\n")).collect();
        std::fs::write(&path, &text).unwrap();
        let sized = FileSpec { count: None, size: Some(1_000), ..spec(&path, 1, FileFormat::Lines) };
        for spec in [spec(&path, 13, FileFormat::Lines), sized, spec(&path, 9_000, FileFormat::Lines)] {
            let plan = planned(&spec).unwrap();
            let mut next = 0;
            for (_, from, to) in slices(&plan) {
                assert_eq!(from, next);
                assert!(text[..to as usize].ends_with('\n') && to > from);
                next = to;
            }
            assert_eq!(next, text.len() as u64);
        }
    }

    #[test]
    fn many_files_empty_ones_and_what_can_not_be_cut() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.csv", b"1\n2\n3\n4\n");
        write("b.csv", b"");
        write("c.csv", b"5\n6");
        let glob = |pattern: &str| FileSpec {
            glob: Some(folder.path().join(pattern).display().to_string()),
            count: Some(3),
            ..FileSpec::default()
        };
        let plan = planned(&glob("*.csv")).unwrap();
        let of: Vec<(u64, u64)> = slices(&plan).into_iter().map(|(_, from, to)| (from, to)).collect();
        assert_eq!(of, vec![(0, 4), (4, 8), (0, 3)]);
        assert!(planned(&glob("*.nothing")).unwrap_err().reason.contains("no file matches"));
        let missing = planned(&spec(&folder.path().join("missing"), 1, FileFormat::Csv)).unwrap_err();
        assert_eq!(missing.kind, DecisionKind::InvalidPlan);
        assert!(missing.reason.contains("missing") && missing.reason.contains("can't be read"), "{}", missing.reason);
        assert_eq!(planned(&glob("b.csv")).unwrap_err().kind, DecisionKind::SkippedEmpty);
        write("d.gz", &[0x1f, 0x8b, 8, 0, 0]);
        assert!(planned(&glob("d.gz")).unwrap_err().reason.contains("gzip"));
        write("german.csv", b"1;\"a\nb\"\n2;3\n");
        let german = FileSpec { format: FileFormat::Csv, ..glob("german.csv") };
        let refused = planned(&german).unwrap_err().reason;
        assert!(refused.contains("has no ',' but ';'") && refused.contains("delimiter = \";\""), "{refused}");
        let told = planned(&FileSpec { delimiter: Some(';'), ..german }).unwrap();
        assert_eq!(slices(&told).into_iter().map(|(_, from, to)| (from, to)).collect::<Vec<_>>(), [(0, 8), (8, 12)]);
        write("open.csv", b"1,\"never closed\n2,3\n");
        let open = FileSpec { format: FileFormat::Csv, ..glob("open.csv") };
        assert!(planned(&open).unwrap_err().reason.contains("never closed"));
        assert!(planned(&spec(folder.path(), 1, FileFormat::Csv)).unwrap_err().reason.contains("is no file"));
    }
}
