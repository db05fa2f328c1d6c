//! The author's guide, as it stands: its commands are run in an empty folder, and its code is the example that is compiled.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const GUIDE: &str = include_str!("../docs/guides/first-handler.md");

/// A fenced block: its language, the name behind it, and its text.
struct Block {
    language: String,
    name: Option<String>,
    text: String,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut lines = markdown.lines();
    while let Some(line) = lines.next() {
        let Some(info) = line.strip_prefix("```").filter(|info| !info.is_empty()) else { continue };
        let mut words = info.split_whitespace().map(str::to_owned);
        let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        found.push(Block { language: words.next().unwrap(), name: words.next(), text: text.join("\n") + "\n" });
    }
    found
}

fn first_part() -> &'static str {
    GUIDE.split("\n## The same in Rust").next().unwrap()
}

#[test]
fn five_commands_lead_from_an_empty_folder_to_a_finished_execution() {
    let blocks = blocks(first_part());
    let commands: Vec<&str> = blocks.iter().filter(|b| b.language == "sh").flat_map(|b| b.text.lines()).collect();
    let files: Vec<&Block> = blocks.iter().filter(|b| b.name.is_some()).collect();
    assert!(GUIDE.contains("five commands and two files"), "what the guide says of itself");
    assert_eq!((commands.len(), files.len()), (5, 2), "{commands:?}");

    let dir = tempfile::tempdir().unwrap();
    let mut script = String::from("set -e\n");
    for command in &commands {
        script.push_str(command);
        script.push('\n');
        if command.starts_with("mkdir") {
            for file in &files {
                script.push_str(&format!(
                    "cat > {} <<'END_OF_FILE'\n{}END_OF_FILE\n",
                    file.name.as_ref().unwrap(),
                    file.text
                ));
            }
        }
    }
    // As a person who stops the process at the end.
    script.push_str("kill $!\nwait $! || true\n");
    let bin = Path::new(env!("CARGO_BIN_EXE_shardcron")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let (out, log) = (dir.path().join("out"), dir.path().join("log"));
    let mut command = Command::new("bash");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SHARDCRON_")) {
        command.env_remove(name);
    }
    let mut child = command
        .args(["-c", &script])
        .current_dir(dir.path())
        .env("PATH", path)
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&out).unwrap())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let status = testkit::poll(Duration::from_secs(90), || child.try_wait().unwrap());
    let said = || format!("{}\n{}", std::fs::read_to_string(&out).unwrap(), std::fs::read_to_string(&log).unwrap());
    if status.is_none() {
        child.kill().unwrap();
    }
    assert!(status.is_some_and(|s| s.success()), "{status:?}\n{}", said());
    let letters = std::fs::read_dir(dir.path().join("letters")).unwrap().flatten();
    let letters = letters.filter(|f| f.file_name().to_string_lossy().starts_with("letter-")).count();
    assert_eq!(letters, 100, "{}", said());
    let listed = std::fs::read_to_string(&out).unwrap();
    assert!(listed.contains("success"), "{}", said());
}

#[test]
fn the_guides_code_is_the_example() {
    let example =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/own_worker.rs")).unwrap();
    let block = blocks(GUIDE).into_iter().find(|b| b.name.as_deref() == Some("own_worker.rs")).unwrap();
    assert_eq!(block.text, example);
    let lines = example.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines <= 26, "a worker of one's own in some twenty lines: {lines}");
}
