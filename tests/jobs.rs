//! Job files as their author meets them: diffs, versions, pruning, deletion, concurrent edits.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use serde_json::{Value, json};
use shardcron_store::Ledger;
use std::process::Output;
use std::time::Duration;
use support::Cluster;
use testkit::wait_for;

const NOOP: &str = "handler = { rust = \"noop\" }\n";

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn write(cluster: &Cluster, name: &str, text: &str) -> String {
    let path = cluster.path(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn names(cluster: &Cluster) -> Vec<String> {
    let list = cluster.json(&["jobs", "list"]);
    list["jobs"].as_array().unwrap().iter().map(|j| j["job"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn apply_shows_what_changes_and_dry_run_changes_nothing() {
    let cluster = Cluster::embedded();
    let text = format!("[job.a]\nschedule = {{ every = \"1h\" }}\n{NOOP}\n[job.b]\n{NOOP}");
    let file = write(&cluster, "jobs.toml", &text);
    assert_eq!(cluster.cli(&["jobs", "apply", &file, "--dry-run"]).status.code(), Some(0));
    assert!(names(&cluster).is_empty());
    cluster.apply(&text);
    let file = write(&cluster, "jobs.toml", &text.replace("1h", "2h").replace("[job.b]", "[job.b]\ntimeout = \"5m\""));
    for flags in [&["--dry-run"][..], &[]] {
        let answer = cluster.json(&[&["jobs", "apply", &file][..], flags].concat());
        assert_eq!(
            (&answer[0]["changes"], &answer[1]["changes"]),
            (
                &json!([{ "key": "schedule.every", "old": "1h", "new": "2h" }]),
                &json!([{ "key": "timeout", "old": "30m", "new": "5m" }])
            )
        );
        assert_eq!((&answer[0]["outcome"], &answer[0]["version"]), (&json!("updated"), &json!(2)));
    }
    let again = cluster.json(&["jobs", "apply", &file]);
    assert_eq!((&again[0]["outcome"], &again[0]["changes"]), (&json!("unchanged"), &json!([])));
    let versions = cluster.json(&["jobs", "versions", "a"]);
    assert_eq!(versions["versions"][0]["changes"][0]["key"], "schedule.every");
    assert!(versions["versions"][1]["who"].as_str().unwrap().contains("command line"), "{versions}");
    assert_eq!(cluster.json(&["jobs", "show", "a", "--version", "1"])["job"]["schedule"]["every"], "1h");
    assert_eq!(cluster.cli(&["jobs", "show", "a", "--version", "9"]).status.code(), Some(2));
}

#[test]
fn prune_deletes_what_its_own_source_no_longer_names() {
    let cluster = Cluster::embedded();
    let job = |name: &str| format!("[job.{name}]\n{NOOP}\n");
    write(&cluster, "mine/one.toml", &job("one"));
    let two = write(&cluster, "mine/two.toml", &(job("two") + &job("three")));
    let other = write(&cluster, "other.toml", &job("other"));
    let mine = cluster.path("mine").display().to_string();
    for target in [&mine, &other] {
        assert!(cluster.cli(&["jobs", "apply", target]).status.success());
    }
    std::fs::write(&two, job("two")).unwrap();
    assert!(cluster.cli(&["jobs", "apply", &mine]).status.success());
    assert_eq!(names(&cluster), ["one", "other", "three", "two"], "only on demand");
    let dry = cluster.cli(&["jobs", "apply", &mine, "--prune", "--dry-run"]);
    assert!(words(&dry).contains("three") && words(&dry).contains("deleted"), "{}", words(&dry));
    assert_eq!(names(&cluster).len(), 4);
    let pruned = cluster.json(&["jobs", "apply", &mine, "--prune"]);
    let gone: Vec<&Value> = pruned.as_array().unwrap().iter().filter(|j| j["outcome"] == "deleted").collect();
    assert_eq!(gone.iter().map(|j| j["name"].as_str().unwrap()).collect::<Vec<_>>(), ["three"]);
    assert_eq!(names(&cluster), ["one", "other", "two"]);
    assert!(words(&cluster.cli(&["jobs", "apply", "/dev/null", "--prune"])).contains("--source NAME"));
    assert!(cluster.cli(&["jobs", "delete", "other"]).status.success());
    assert_eq!(cluster.cli(&["jobs", "delete", "other"]).status.code(), Some(2), "no such job any more");
    assert_eq!(names(&cluster), ["one", "two"]);
}

#[test]
fn a_concurrent_edit_is_refused_with_who_and_when() {
    let cluster = Cluster::embedded();
    let file = write(&cluster, "jobs.toml", &format!("[job.a]\ntimeout = \"1m\"\n{NOOP}"));
    let expect = |version: &str| cluster.cli(&["jobs", "apply", &file, "--expect-version", version]);
    assert!(expect("0").status.success());
    write(&cluster, "jobs.toml", &format!("[job.a]\ntimeout = \"2m\"\n{NOOP}"));
    let refused = expect("0");
    assert_eq!(refused.status.code(), Some(1));
    assert!(words(&refused).contains("'a' is at version 1, changed by"), "{}", words(&refused));
    assert!(expect("a=1").status.success());
    for nonsense in ["b=1", "one"] {
        assert_eq!(expect(nonsense).status.code(), Some(2), "{nonsense}");
    }
    assert_eq!(cluster.cli(&["jobs", "delete", "a", "--expect-version", "1"]).status.code(), Some(1));
    assert!(cluster.cli(&["jobs", "delete", "a", "--expect-version", "2"]).status.success());
}

/// Impossible jobs are refused when they are applied, each with its key; no such job exists afterwards.
#[test]
fn a_03_impossible_jobs_are_refused_at_once() {
    let cluster = Cluster::embedded();
    let cases: Vec<Value> = serde_json::from_str(include_str!("../domain/tests/cases/cron.json")).unwrap();
    let bad: Vec<&Value> = cases.iter().filter(|c| c["expect"] == "error").collect();
    assert!(bad.len() > 10, "{}", bad.len());
    let (mut text, mut count) = (String::new(), 0);
    let mut add = |name: &str, keys: &str| {
        text += &format!("[job.{name}]\n{keys}\n{NOOP}\n");
        count += 1;
    };
    for case in bad {
        let pattern = serde_json::to_string(&case["expr"]).unwrap();
        add(case["id"].as_str().unwrap(), &format!("schedule = {{ cron = {pattern} }}"));
    }
    add("zone", "schedule = { cron = \"@daily\", timezone = \"Mars/Phobos\" }");
    add("negative", "schedule = { every = \"-5m\" }");
    add("no-shards", "shards = { count = 0 }");
    add("many-shards", "shards = { modulo = 1000001 }");
    add("\"a/b\"", "");
    add("\"\"", "");
    add(&"x".repeat(300), "");
    let file = write(&cluster, "bad.toml", &text);
    let refused = cluster.cli(&["jobs", "apply", &file]);
    let told = words(&refused);
    assert_eq!(refused.status.code(), Some(2), "{told}");
    assert_eq!(told.lines().count(), count, "one fault for each job: {told}");
    for wanted in
        ["Mars/Phobos", "no-shards': shards", "many-shards': shards", "'a/b'", "can't be empty", "at most 100"]
    {
        assert!(told.contains(wanted), "{wanted}: {told}");
    }
    assert!(names(&cluster).is_empty());
}

/// A one-shot for a time that has passed is refused; one that has fired may be applied again unchanged (S-14, A-01).
#[test]
fn s_14_a_one_shot_in_the_past_is_refused() {
    let cluster = Cluster::embedded();
    let one_shot = |at: &str, zone: &str| {
        let schedule = format!("schedule = {{ at = \"{at}\", timezone = \"{zone}\" }}");
        let file = write(&cluster, "once.toml", &format!("[job.once]\n{schedule}\n{NOOP}"));
        let output = cluster.cli(&["jobs", "apply", &file]);
        (output.status.code(), words(&output))
    };
    let (code, told) = one_shot("2020-01-01T00:00:00Z", "UTC");
    assert!(
        code == Some(2) && told.contains("line 2: job 'once': schedule.at") && told.contains("in the past"),
        "{told}"
    );
    for (at, zone, why) in [
        ("2027-03-14T02:30:00", "America/New_York", "does not exist"),
        ("2027-02-30T00:00:00", "UTC", "is not an instant"),
        ("2027-03-23", "Asia/Shanghai", "is not an instant"),
    ] {
        let (code, told) = one_shot(at, zone);
        assert!(code == Some(2) && told.contains(why), "{at}: {told}");
    }
    assert_eq!(one_shot("2099-11-01T01:30:00", "America/New_York").0, Some(0));
    // Its time passes, it fires; the same file again is no fault.
    cluster.block_on(cluster.ledger().execute_script("UPDATE jobs SET next_fire_ms = NULL")).unwrap();
    let (code, told) = one_shot("2099-11-01T01:30:00", "America/New_York");
    assert!(code == Some(0) && told.contains("unchanged"), "{told}");
}

/// What is stored and shown does not depend on the zone of the host or of the database's session (S-12).
#[test]
fn s_12_hosts_and_sessions_in_other_zones_store_the_same() {
    let services = testkit::shared();
    let mut cluster = Cluster::on(&services.fresh_database(), None, None);
    cluster.block_on(cluster.ledger().execute_script("SET GLOBAL time_zone = '+09:00'")).unwrap();
    let mut seen: Vec<(Value, i64)> = Vec::new();
    for zone in ["Australia/Sydney", "America/St_Johns", ""] {
        cluster.set("TZ", zone);
        let name = "local";
        let file = write(
            &cluster,
            "jobs.toml",
            &format!("[job.{name}]\nschedule = {{ cron = \"30 2 29 2 * \", timezone = \"America/New_York\" }}\n{NOOP}"),
        );
        assert!(cluster.cli(&["jobs", "apply", &file]).status.success());
        let list = cluster.json(&["jobs", "list"])["jobs"][0].clone();
        assert_eq!(list["version"], 1, "unchanged for the next host");
        seen.push((list, cluster.number("SELECT next_fire_ms FROM jobs")));
    }
    cluster.block_on(cluster.ledger().execute_script("SET GLOBAL time_zone = 'SYSTEM'")).unwrap();
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
}

/// F2 over a change of the schedule: what was due and undecided is decided under the schedule that it is of (docs/decisions/0015).
#[test]
fn f2_a_changed_schedule_leaves_no_instant_without_a_decision() {
    let mut cluster = Cluster::embedded();
    let job = |schedule: &str| {
        format!(
            "[job.a]\nschedule = {{ {schedule} }}\nmisfire = {{ policy = \"fire_all\", grace = \"1h\" }}\noverlap = \"allow\"\n{NOOP}"
        )
    };
    cluster.apply(&job("every = \"1s\""));
    // Nobody leads for a while; then the schedule is changed twice.
    let due = "SELECT next_fire_ms FROM jobs";
    let first = cluster.number(due);
    let passed = |ms: i64| {
        wait_for("instants to pass", Duration::from_secs(30), || {
            std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64 > first + ms
        });
    };
    passed(3_500);
    cluster.apply(&job("every = \"700ms\""));
    passed(5_000);
    cluster.apply(&job("every = \"1h\""));
    let changed: Vec<i64> = {
        let rows =
            cluster.block_on(cluster.ledger().query("SELECT upto_ms FROM job_owed ORDER BY upto_ms", &[])).unwrap();
        rows.iter()
            .map(|row| if let shardcron_store::SqlArg::Int(n) = row[0] { n } else { panic!("{row:?}") })
            .collect()
    };
    assert_eq!((changed.len(), cluster.number(due)), (2, first));
    let multiples = |span: i64, after: i64, upto: i64| (after / span + 1..=upto / span).map(move |n| n * span);
    let wanted: Vec<i64> =
        multiples(1_000, first - 1, changed[0]).chain(multiples(700, changed[0], changed[1])).collect();
    cluster.start("up", "all");
    wait_for("each owed instant to be decided", Duration::from_secs(60), || cluster.number(due) > changed[1]);
    let job = cluster.block_on(cluster.ledger().job("a")).unwrap().unwrap();
    let decisions = cluster.block_on(cluster.ledger().decisions(job.id, 0, i64::MAX, 100)).unwrap();
    let decided: Vec<i64> = decisions.iter().map(|d| d.nominal_ms).filter(|at| *at <= changed[1]).collect();
    assert_eq!(decided, wanted);
    assert!(decisions.iter().all(|d| d.execution.is_some()), "{decisions:?}");
    assert_eq!(job.owed, []);
}

/// A job whose schedule can't be used gets a decision at its instant, and others go on.
#[test]
fn f2_a_schedule_that_can_not_be_computed_is_a_decision() {
    let mut cluster = Cluster::embedded();
    cluster.apply(&format!(
        "[job.a]\nschedule = {{ every = \"1s\" }}\n{NOOP}\n[job.b]\nschedule = {{ every = \"1s\" }}\n{NOOP}"
    ));
    let break_it =
        "UPDATE jobs SET spec = REPLACE(spec, '\"every\":\"1s\"', '\"cron\":\"0 61 * * *\"') WHERE name = 'a'";
    cluster.block_on(cluster.ledger().execute_script(break_it)).unwrap();
    cluster.start("up", "all");
    wait_for("both to be decided", Duration::from_secs(60), || {
        cluster.number("SELECT COUNT(*) FROM decisions WHERE kind = 5") == 1
            && cluster.number("SELECT COUNT(*) FROM executions") >= 2
    });
    let a = cluster.block_on(cluster.ledger().job("a")).unwrap().unwrap();
    let decision = cluster.block_on(cluster.ledger().decisions(a.id, 0, i64::MAX, 9)).unwrap().remove(0);
    assert!(decision.reason.unwrap().contains("61 is not from 0 to 23"));
    assert!(cluster.json(&["jobs", "list"])["jobs"][0]["state"].as_str().unwrap().starts_with("invalid"));
}

/// What a file says of other jobs is wrong or right by what the ledger has: the file's author is told, with exit code 2, and nothing
/// is written.
#[test]
fn unknown_upstreams_circles_and_followed_jobs_are_misuse() {
    let cluster = Cluster::embedded();
    let apply = |text: String| {
        let file = write(&cluster, "jobs.toml", &text);
        let output = cluster.cli(&["jobs", "apply", &file]);
        (output.status.code(), words(&output))
    };
    let (code, told) = apply(format!("[job.report]\nafter = [\"laod\"]\n{NOOP}"));
    assert!(code == Some(2) && told.contains("job 'report': after: there is no job 'laod'"), "{told}");
    assert!(names(&cluster).is_empty());
    assert_eq!(apply(format!("[job.load]\n{NOOP}\n[job.report]\nafter = [\"load\"]\n{NOOP}")).0, Some(0));
    let (code, told) = apply(format!("[job.other]\nafter = [\"laod\"]\n{NOOP}"));
    assert!(code == Some(2) && told.contains("did you mean 'load'?"), "{told}");
    // The circle is closed by a file that does not show it.
    let (code, told) = apply(format!("[job.load]\nafter = [\"report\"]\n{NOOP}"));
    assert!(code == Some(2) && told.contains("in a circle"), "{told}");
    let refused = cluster.cli(&["jobs", "delete", "load"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(words(&refused).contains("job 'report' follows it"), "{}", words(&refused));
    assert_eq!(names(&cluster), ["load", "report"]);
}

/// What is imported is a job file like any other: valid, and applied as it is.
#[test]
fn imported_job_files_are_valid_and_can_be_applied() {
    let cluster = Cluster::embedded();
    let tab = write(&cluster, "tab", "CRON_TZ=America/New_York\n* 3 * * * /opt/nightly.sh\n@reboot /opt/start\n");
    let dump = write(
        &cluster,
        "dump.sql",
        "INSERT INTO `xxl_job_info` (id, job_group, job_desc, schedule_type, schedule_conf, executor_handler, glue_type) \
         VALUES (1, 1, 'it\\'s', 'CRON', '0 0 2 ? * 2-6', 'settle', 'BEAN');",
    );
    let out = |name: &str| cluster.path(name).display().to_string();
    let crontab = cluster.cli(&["import", "crontab", &tab, "--output", &out("a.toml")]);
    assert!(crontab.status.success() && words(&crontab).contains("1 carried over, 1 not"), "{}", words(&crontab));
    let xxl = cluster.json(&["import", "xxl-job", &dump, "--timezone", "Asia/Shanghai", "--output", &out("b.toml")]);
    assert_eq!(xxl["jobs"], 1);
    let again = cluster.cli(&["import", "crontab", &tab, "--output", &out("a.toml")]);
    assert_eq!(again.status.code(), Some(1), "an existing file is not replaced");
    let printed = cluster.cli(&["import", "crontab", &tab]);
    assert_eq!(String::from_utf8_lossy(&printed.stdout), std::fs::read_to_string(out("a.toml")).unwrap());
    let valid = cluster.json(&["jobs", "validate", &out("a.toml")]);
    assert_eq!(valid["valid"], json!(["nightly"]));
    assert!(valid["hints"][0]["hint"].as_str().unwrap().contains("fires 60 times"), "{valid}");
    for file in ["a.toml", "b.toml"] {
        assert!(cluster.cli(&["jobs", "apply", &out(file)]).status.success());
    }
    assert_eq!(names(&cluster), ["nightly", "settle"]);
    let next = cluster.json(&["jobs", "next", "settle", "--from", "2026-11-27T20:00:00Z", "--count", "1"]);
    assert_eq!(next[0]["next"], json!(["2026-11-29T18:00:00Z"]), "Monday 02:00 in Shanghai");
    assert_eq!(cluster.cli(&["import", "xxl-job", &tab]).status.code(), Some(2));
}
