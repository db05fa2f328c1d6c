//! The author's guide, as it stands: its commands are run in an empty folder, and its code is the example that is compiled.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use shardcron_store::SqlArg;
use shardcron_store::sql::{SqlLedger, SqlOptions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

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

/// The part in programs, and the part in Rust.
fn parts() -> (&'static str, &'static str) {
    let (first, rest) = GUIDE.split_once("\n## The same in Rust").unwrap();
    (first, rest.split_once("\n## Its test").unwrap().0)
}

/// Runs the commands of a part, in their order, in a folder; the files are written once their folder is made (the first command), by
/// `write`. At the end the process in the background is stopped. What was printed.
fn follow(
    part: &str,
    (commands, files): (usize, usize),
    dir: &Path,
    path: &str,
    write: impl Fn(&Block) -> String,
) -> String {
    let blocks = blocks(part);
    let lines: Vec<&str> = blocks.iter().filter(|b| b.language == "sh").flat_map(|b| b.text.lines()).collect();
    let named: Vec<&Block> = blocks.iter().filter(|b| b.name.is_some()).collect();
    assert_eq!((lines.len(), named.len()), (commands, files), "{lines:?}");
    let mut script = String::from("set -e\n");
    for (number, command) in lines.iter().enumerate() {
        script.push_str(&format!("{command}\n"));
        if number == 0 {
            named.iter().for_each(|file| script.push_str(&write(file)));
        }
    }
    // As a person who stops the process at the end.
    script.push_str("kill $!\nwait $! || true\n");
    let (out, log) = (dir.join("out"), dir.join("log"));
    let mut command = Command::new("bash");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SHARDCRON_")) {
        command.env_remove(name);
    }
    let mut child = command
        .args(["-c", &script])
        .current_dir(dir)
        .env("PATH", format!("{path}:{}", std::env::var("PATH").unwrap()))
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(&out).unwrap())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let status = testkit::poll(Duration::from_secs(90), || child.try_wait().unwrap());
    let said = format!("{}\n{}", std::fs::read_to_string(&out).unwrap(), std::fs::read_to_string(&log).unwrap());
    if status.is_none() {
        child.kill().unwrap();
    }
    assert!(status.is_some_and(|s| s.success()), "{status:?}\n{said}");
    said
}

/// A file as it stands in the guide.
fn saved(name: &str, text: &str) -> String {
    format!("cat > {name} <<'END_OF_FILE'\n{text}END_OF_FILE\n")
}

#[test]
fn five_commands_lead_from_an_empty_folder_to_a_finished_execution() {
    assert!(GUIDE.contains("five commands and two files"), "what the guide says of itself");
    let dir = tempfile::tempdir().unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_shardcron")).parent().unwrap();
    let said = follow(parts().0, (5, 2), dir.path(), &bin.display().to_string(), |file| {
        saved(file.name.as_ref().unwrap(), &file.text)
    });
    let letters = std::fs::read_dir(dir.path().join("letters")).unwrap().flatten();
    let letters = letters.filter(|f| f.file_name().to_string_lossy().starts_with("letter-")).count();
    assert_eq!(letters, 100, "{said}");
    assert!(said.contains("success"), "{said}");
}

/// The compiled example, built now unless the same build that made this test has made it.
fn example() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_shardcron")).parent().unwrap();
    let built = folder.join("examples/own_worker");
    let changed = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    let code = Path::new(ROOT).join("examples/own_worker.rs");
    let name = |file: &std::fs::DirEntry| file.file_name().to_string_lossy().into_owned();
    let library = |file: &std::fs::DirEntry| name(file).starts_with("libshardcron-") && name(file).ends_with(".rlib");
    let libraries = std::fs::read_dir(folder.join("deps")).into_iter().flatten().flatten().filter(library);
    // The newest: a library that was built after the example may be another than the one in it.
    let library = libraries.filter_map(|file| changed(&file.path())).max();
    let fresh = library.is_some() && changed(&built) >= library.max(changed(&code));
    if !fresh {
        let mut build = Command::new(cargo());
        build.args(["build", "--offline", "--quiet", "--example", "own_worker"]).current_dir(ROOT);
        if folder.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    }
    built
}

fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| env!("CARGO").to_owned())
}

/// Only the compiler's minutes are left out: where the guide builds, the package's manifest is resolved, and the program is the example,
/// whose code is the guide's.
#[test]
fn seven_commands_lead_from_an_empty_folder_to_accounts_that_are_settled_once() {
    assert!(GUIDE.contains("seven commands and four files"), "what the guide says of itself");
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(ROOT, dir.path().join("shardcron")).unwrap();
    let tools = dir.path().join("tools");
    std::fs::create_dir(&tools).unwrap();
    let wrapper = format!(
        "#!/bin/sh\nset -e\ncase \"$*\" in\n\
         'new settle') exec '{0}' new --quiet --vcs none settle ;;\n\
         'build --release') cp ../shardcron/Cargo.lock . && '{0}' metadata --offline --format-version 1 > ../metadata\n\
         mkdir -p target/release && cp '{1}' target/release/settle ;;\n\
         *) echo \"not in the guide: cargo $*\" >&2; exit 1 ;;\nesac\n",
        cargo(),
        example().display()
    );
    std::fs::write(tools.join("cargo"), wrapper).unwrap();
    std::fs::set_permissions(tools.join("cargo"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let said = follow(parts().1, (7, 4), dir.path(), &tools.display().to_string(), |file| {
        match file.name.as_deref().unwrap() {
            "own_worker.rs" => saved("src/main.rs", &file.text),
            // Its own section is empty in a new package, and stands here in full.
            "Cargo.toml" => format!(
                "sed -i '/^.dependencies.$/d' Cargo.toml\ncat >> Cargo.toml <<'END_OF_FILE'\n{}END_OF_FILE\n",
                file.text
            ),
            name => saved(name, &file.text),
        }
    });
    assert!(said.contains("success"), "{said}");
    let metadata = std::fs::read_to_string(dir.path().join("metadata")).unwrap();
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap();
    let own = metadata["packages"].as_array().unwrap().iter().find(|p| p["name"] == "settle").unwrap();
    let names: Vec<_> = own["dependencies"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["shardcron", "shardcron-sdk", "shardcron-testing"]);
    let url = format!("sqlite://{}", dir.path().join("settle/shardcron.db").display());
    let settled = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let ledger = SqlLedger::connect(&url, SqlOptions::default()).await.unwrap();
        ledger.query("SELECT COUNT(*), MIN(settled), MAX(settled) FROM accounts", &[]).await.unwrap()
    });
    assert_eq!(settled, [[SqlArg::Int(100_000), SqlArg::Int(1), SqlArg::Int(1)]], "{said}");
}

#[test]
fn the_guides_code_is_the_example() {
    let read = |name: &str| std::fs::read_to_string(Path::new(ROOT).join("examples").join(name)).unwrap();
    let block = |name: &str| blocks(parts().1).into_iter().find(|b| b.name.as_deref() == Some(name)).unwrap().text;
    let example = read("own_worker.rs");
    assert_eq!(block("own_worker.rs"), example);
    assert_eq!(block("accounts.py"), read("own-worker/accounts.py"));
    let job = read("own-worker/job.toml");
    assert!(job.ends_with(&block("jobs.toml")), "{job}");
    let lines = example.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines <= 26, "a worker of one's own in some twenty lines: {lines}");
}
