//! Triggers typed into the RabbitMQ management UI, through the HTTP API that it uses itself.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use serde_json::{Value, json};
use shardcron_domain::firing::DecisionKind;
use shardcron_store::Ledger as _;
use std::time::{Duration, Instant};
use support::Cluster;
use testkit::{Management, wait_for};

const BOUND: Duration = Duration::from_secs(20);
/// What the UI's form sends: no content type, not persistent, no id.
fn form() -> Value {
    json!({})
}

fn cluster() -> (Cluster, Management) {
    let mut cluster = Cluster::on_services();
    cluster.apply("[job.demo]\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n[job.reconcile]\nhandler = { rust = \"noop\" }\n\
         [job.wide]\nhandler = { rust = \"noop\" }\nshards = { modulo = 4 }\n");
    cluster.start_all(1, 1);
    let management = testkit::shared().management_of(cluster.amqp_url());
    wait_for("the trigger queue", BOUND, || {
        management.queues().is_ok_and(|q| q.contains(&"shardcron.triggers".to_owned()))
    });
    (cluster, management)
}

/// Publishes as the form does. RabbitMQ 3.10 refuses what comes within a moment of a quorum queue's declaration; a person clicks
/// again.
fn publish(management: &Management, exchange: &str, key: &str, payload: &[u8]) {
    testkit::wait_until_some("RabbitMQ to take a message", BOUND, || {
        management.publish_bytes(exchange, key, payload, &form()).ok().filter(|routed| *routed)
    });
}

fn executions(cluster: &Cluster, job: &str) -> Vec<Value> {
    cluster.json(&["executions", "list", "--job", job]).as_array().cloned().unwrap_or_default()
}

fn wait_executions(cluster: &Cluster, job: &str, count: usize) {
    wait_for(&format!("{count} executions of {job}"), BOUND, || executions(cluster, job).len() >= count);
}

#[test]
fn g_01_the_forms_of_a_trigger_that_a_person_may_type() {
    let (cluster, management) = cluster();
    let began = Instant::now();
    publish(&management, "amq.default", "shardcron.triggers", r#"{"job":"demo"}"#.as_bytes());
    wait_executions(&cluster, "demo", 1);
    assert!(began.elapsed() < Duration::from_secs(5), "fired after {:?}", began.elapsed());
    for (exchange, key, payload) in [
        ("amq.default", "shardcron.triggers", "demo"),
        ("shardcron.trigger", "demo", ""),
        ("shardcron.trigger", "demo", "{}"),
        ("shardcron.trigger", "demo", r#"{"params":{"date":"2013-01-31"}}"#),
    ] {
        publish(&management, exchange, key, payload.as_bytes());
    }
    wait_executions(&cluster, "demo", 5);
    assert_eq!(management.queue_depth("shardcron.dead").unwrap(), 0);
}

#[test]
fn g_02_g_08_what_is_wrong_ends_dead_with_its_sentence_and_blocks_nothing() {
    let (cluster, management) = cluster();
    let deep = format!("{{\"job\":\"demo\",\"params\":{{\"a\":{}1{}}}}}", "[".repeat(10_000), "]".repeat(10_000));
    // The management plugin itself takes no more than 8 MiB; the domain's own test goes to 10 MiB.
    let large = format!("{{\"job\":\"demo\",\"params\":{{\"a\":\"{}\"}}}}", "x".repeat(5 << 20));
    let utf16: Vec<u8> = r#"{"job":"demo"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let bad: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"{".to_vec(),
        b"[]".to_vec(),
        b"null".to_vec(),
        b"\"x\"".to_vec(),
        utf16,
        "\u{feff}{\"job\":\"demo\"}".into(),
        vec![0x1f, 0x8b, 8, 0, 0, 0],
        br#"{"job":1}"#.to_vec(),
        br#"{"job":"recncile"}"#.to_vec(),
        br#"{"job":"demo","params":[1]}"#.to_vec(),
        large.into(),
        deep.into(),
        br#"{"job":"a","job":"demo"}"#.to_vec(),
        br#"{"job":"demo","shard":4,"priorty":1,"run_at":"2026-03-08T02:30"}"#.to_vec(),
        br#"{"job":"demo","params":{"x":1e400}}"#.to_vec(),
    ];
    for payload in &bad {
        publish(&management, "amq.default", "shardcron.triggers", payload);
    }
    publish(&management, "amq.default", "shardcron.triggers", r#"{"job":"demo"}"#.as_bytes());
    wait_executions(&cluster, "demo", 1);
    let dead = cluster.json(&["dead", "list"]);
    let dead = dead.as_array().unwrap();
    assert_eq!(dead.len(), bad.len(), "{dead:?}");
    assert!(dead.iter().all(|d| d["kind"] == "message" && d["reason"].as_str().is_some_and(|r| r.len() > 20)));
    assert!(dead.iter().all(|d| d["text"].as_str().is_none_or(|t| t.len() <= 4_200)), "cut to be readable");
    let has = |words: &str| dead.iter().any(|d| d["reason"].as_str().is_some_and(|r| r.contains(words)));
    assert!(has("unknown job 'recncile'; did you mean 'reconcile'?"));
    assert!(has("unknown field 'priorty'") || has("unknown field 'shard'"));
    wait_for("the dead queue", BOUND, || management.queue_depth("shardcron.dead").is_ok_and(|d| d == bad.len() as u64));
    let messages = management.get_messages("shardcron.dead", bad.len()).unwrap();
    assert!(
        messages.iter().all(|m| m.header("x-shardcron-error").as_str().is_some_and(|s| s.len() > 20)),
        "{messages:?}"
    );
    assert_eq!(executions(&cluster, "demo").len(), 1, "nothing else fired");
    assert_eq!(cluster.log("scheduler-1").matches("broker is away").count(), 0, "the connection was not restarted");
}

#[test]
fn g_06_twice_without_an_id_fires_twice_and_with_one_once() {
    let (cluster, management) = cluster();
    for _ in 0..2 {
        publish(&management, "amq.default", "shardcron.triggers", r#"{"job":"demo"}"#.as_bytes());
    }
    wait_executions(&cluster, "demo", 2);
    for _ in 0..3 {
        publish(&management, "amq.default", "shardcron.triggers", r#"{"job":"demo","request_id":"r1"}"#.as_bytes());
    }
    // A mark behind them: when it has fired, the three have been looked at.
    publish(&management, "amq.default", "shardcron.triggers", r#"{"job":"reconcile","request_id":"mark"}"#.as_bytes());
    wait_executions(&cluster, "reconcile", 1);
    let with_id = executions(&cluster, "demo").iter().filter(|e| e["fire_key"] == "request:r1").count();
    assert_eq!((executions(&cluster, "demo").len(), with_id), (3, 1));
    // Who asks once more hears of which execution it is a duplicate; a wanted instant and other shards go by message, too.
    let of = executions(&cluster, "demo").iter().find(|e| e["fire_key"] == "request:r1").unwrap()["id"].clone();
    management.declare_queue("answers", &json!({ "durable": false, "auto_delete": true, "arguments": {} })).unwrap();
    let ask = |payload: &str| {
        let properties = json!({ "reply_to": "answers", "correlation_id": "c" });
        assert!(management.publish("amq.default", "shardcron.triggers", payload, &properties).unwrap());
        let answer =
            testkit::wait_until_some("an answer", BOUND, || management.take_messages("answers", 1).unwrap().pop());
        serde_json::from_str::<Value>(&answer.text()).unwrap()
    };
    let again = ask(r#"{"job":"demo","request_id":"r1"}"#);
    assert_eq!((&again["outcome"], &again["execution"]), (&json!("duplicate"), &of));
    assert!(again["message"].as_str().unwrap().starts_with(&format!("duplicate of {}", of.as_str().unwrap())));
    let past = ask(r#"{"job":"wide","request_id":"r2","at":"2026-03-08T02:30:00-05:00","shards":{"only":[1,3]}}"#);
    assert_eq!(past["outcome"], "fired", "{past}");
    let wide = executions(&cluster, "wide");
    assert_eq!((&wide[0]["nominal_ms"], &wide[0]["shards_total"]), (&json!(1_772_955_000_000_i64), &json!(2)));
    let future = ask(r#"{"job":"wide","request_id":"r3","at":"2199-01-01T00:00:00Z"}"#);
    assert_eq!((&future["outcome"], executions(&cluster, "wide").len()), (&json!("waiting"), 1), "{future}");
    let twice = ask(r#"{"job":"wide","request_id":"r3","at":"2199-01-01T00:00:00Z"}"#);
    assert_eq!(twice["outcome"], "duplicate", "{twice}");
    assert_eq!(executions(&cluster, "demo").len(), 3);
}

#[test]
fn g_07_large_ids_reach_the_handler_unchanged() {
    let mut cluster = Cluster::on_services();
    let file = cluster.path("seen.txt");
    cluster.apply(&format!(
        "[job.show]\nhandler = {{ exec = [\"sh\", \"-c\", 'printf %s \"$SHARDCRON_PARAMS\" > {}'] }}\n",
        file.display()
    ));
    cluster.start_all(1, 1);
    let management = testkit::shared().management_of(cluster.amqp_url());
    wait_for("the trigger queue", BOUND, || {
        management.queues().is_ok_and(|q| q.contains(&"shardcron.triggers".to_owned()))
    });
    let payload = r#"{"job":"show","params":{"id":9007199254740993,"t":"2026-13-01"}}"#;
    publish(&management, "amq.default", "shardcron.triggers", payload.as_bytes());
    wait_executions(&cluster, "show", 1);
    wait_for("the handler to write", BOUND, || std::fs::read_to_string(&file).is_ok_and(|t| !t.is_empty()));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), r#"{"id":9007199254740993,"t":"2026-13-01"}"#);
}

fn params_of(cluster: &Cluster, id: &Value) -> Value {
    let id = id.as_str().unwrap().parse().unwrap();
    Value::Object(cluster.block_on(cluster.ledger().execution_head(id)).unwrap().unwrap().params)
}

/// What fires is known by its instant or by its request, and never by its parameters (I-07). Nothing is left out because another had the
/// same; a request id is text, so that a number is no second spelling of it. Where parameters are compared, which is whether a job has
/// changed, 11497 and "11497" are two, and the order of keys is none.
#[test]
fn i_07_parameters_leave_nothing_out_and_are_compared_by_value() {
    let mut cluster = Cluster::on_services();
    let tick = |cluster: &Cluster, params: &str| {
        let file = cluster.path("tick.toml");
        let schedule = "schedule = { cron = \"* * * * * *\" }\noverlap = \"allow\"";
        let job = format!("[job.tick]\n{schedule}\nhandler = {{ rust = \"noop\" }}\nparams = {{ {params} }}\n");
        std::fs::write(&file, job).unwrap();
        cluster.json(&["jobs", "apply", &file.display().to_string()])[0]["outcome"].as_str().unwrap().to_owned()
    };
    let number = "id = 11497";
    assert_eq!(tick(&cluster, number), "created");
    assert_eq!(tick(&cluster, number), "unchanged");
    cluster.apply("[job.demo]\nhandler = { rust = \"noop\" }\noverlap = \"allow\"\n");
    cluster.start_all(1, 1);
    let management = testkit::shared().management_of(cluster.amqp_url());
    wait_for("the trigger queue", BOUND, || {
        management.queues().is_ok_and(|q| q.contains(&"shardcron.triggers".to_owned()))
    });
    // Three times each: by message without an id, with ids of their own, and by hand.
    let params = [r#"{"id":11497}"#, r#"{"id":"11497"}"#, r#"{"b":1,"a":2}"#, r#"{"a":2,"b":1}"#];
    for (n, text) in params.iter().enumerate() {
        let message = format!(r#"{{"job":"demo","params":{text}}}"#);
        publish(&management, "amq.default", "shardcron.triggers", message.as_bytes());
        let message = format!(r#"{{"job":"demo","request_id":"r{n}","params":{text}}}"#);
        publish(&management, "amq.default", "shardcron.triggers", message.as_bytes());
        let fields: serde_json::Map<String, Value> = serde_json::from_str(text).unwrap();
        let words: Vec<String> = fields.iter().flat_map(|(k, v)| ["--param".to_owned(), format!("{k}={v}")]).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let fired = cluster.json(&[&["trigger", "demo"], words.as_slice()].concat());
        assert_eq!(fired["outcome"], "fired", "{fired}");
    }
    wait_executions(&cluster, "demo", 3 * params.len());
    let demo: Vec<Value> = executions(&cluster, "demo").iter().map(|e| params_of(&cluster, &e["id"])).collect();
    assert_eq!(demo.len(), 3 * params.len());
    for (text, times) in params.iter().zip([3, 3, 6, 6]) {
        let wanted: Value = serde_json::from_str(text).unwrap();
        assert_eq!(demo.iter().filter(|of| **of == wanted).count(), times, "{text}: {demo:?}");
    }
    // The same request is the same whatever its parameters; that of another spelling is another, and a number is none.
    management.declare_queue("answers", &json!({ "durable": false, "auto_delete": true, "arguments": {} })).unwrap();
    let ask = |payload: &str| {
        let properties = json!({ "reply_to": "answers", "correlation_id": "c" });
        assert!(management.publish("amq.default", "shardcron.triggers", payload, &properties).unwrap());
        let answer =
            testkit::wait_until_some("an answer", BOUND, || management.take_messages("answers", 1).unwrap().pop());
        serde_json::from_str::<Value>(&answer.text()).unwrap()["outcome"].as_str().unwrap().to_owned()
    };
    assert_eq!(ask(r#"{"job":"demo","request_id":"11497"}"#), "fired");
    assert_eq!(ask(r#"{"params":{"id":"x"},"request_id":"11497","job":"demo"}"#), "duplicate");
    assert_eq!(ask(r#"{"job":"demo","request_id":"011497"}"#), "fired");
    assert_eq!(ask(r#"{"job":"demo","request_id":11497}"#), "rejected");
    // Every instant of the schedule fires, whatever its parameters are by then.
    let ticks = |n: usize| wait_executions(&cluster, "tick", n + executions(&cluster, "tick").len());
    ticks(1);
    for (params, outcome) in [
        ("id = \"11497\"", "updated"),
        ("b = 1, a = 2", "updated"),
        ("a = 2, b = 1", "unchanged"),
        ("a = 2, b = \"1\"", "updated"),
    ] {
        assert_eq!(tick(&cluster, params), outcome, "{params}");
        ticks(1);
    }
    let job = cluster.block_on(cluster.ledger().job("tick")).unwrap().unwrap().id;
    let decisions = cluster.block_on(cluster.ledger().decisions(job, 0, i64::MAX, 1_000)).unwrap();
    for pair in decisions.windows(2) {
        assert_eq!(pair[1].nominal_ms - pair[0].nominal_ms, 1_000, "each instant once: {pair:?}");
    }
    assert!(decisions.iter().all(|d| d.kind == DecisionKind::Fired), "and none is left out: {decisions:?}");
}

/// Parameters are data on every way in, whatever they are called and whatever stands in them: the program has the arguments and the variables
/// of its job and finds the parameters as JSON, letter by letter. A message that names a command, a variable or a handler is refused, and so is
/// a job with a variable that decides what runs (Z-03).
#[test]
fn z_03_a_trigger_sets_no_command_and_no_environment() {
    const SHOW: &str = "import json, os, sys; given = json.load(open(os.environ['SHARDCRON_INPUT'])); \
        json.dump({'argv': sys.argv[2:], 'env': dict(os.environ), 'params': given['params']}, open(sys.argv[1] + '.new', 'w')); \
        os.rename(sys.argv[1] + '.new', sys.argv[1])";
    let mut cluster = Cluster::on_services();
    cluster.set("SHARDCRON_WORKER_ALLOW_EXEC", "python3");
    let (shown, pwn) = (cluster.path("shown.json"), cluster.path("pwn"));
    let argv = json!(["python3", "-c", SHOW, shown.display().to_string(), "--job=own", "$(id)"]);
    cluster.apply(&format!("[job.show]\nhandler = {{ exec = {argv} }}\noverlap = \"allow\"\n"));
    cluster.start_all(1, 1);
    let management = testkit::shared().management_of(cluster.amqp_url());
    wait_for("the trigger queue", BOUND, || {
        management.queues().is_ok_and(|q| q.contains(&"shardcron.triggers".to_owned()))
    });
    let touch = format!("; touch {}", pwn.display());
    let params = json!({
        "args": [touch, "$(id)", "--output=/etc/x"], "; id": touch, "$(id)": format!("$(touch {})", pwn.display()),
        "--output": "/etc/x", "lines": "one\ntwo", "nul": "a\u{0}b", "LD_PRELOAD": "/tmp/evil.so", "PATH": "/tmp/evil", "env": {"PATH": "/tmp/evil"},
        "command": ["sh", "-c", touch], "quote": "'; \"; `id`",
    });
    let check = |way: &str, of: &Value| {
        let found = testkit::wait_until_some(way, BOUND, || std::fs::read_to_string(&shown).ok());
        let found: Value = serde_json::from_str(&found).unwrap();
        std::fs::remove_file(&shown).unwrap();
        assert_eq!(found["argv"], json!(["--job=own", "$(id)"]), "{way}: the job's own, and no more");
        assert_eq!(&found["params"], of, "{way}");
        let env = found["env"].as_object().unwrap();
        assert_eq!(serde_json::from_str::<Value>(env["SHARDCRON_PARAMS"].as_str().unwrap()).unwrap(), *of, "{way}");
        // Python may be started by a wrapper with variables of its own, so the names are asked for.
        let named = of.as_object().unwrap().keys().filter(|name| *name != "PATH" && env.contains_key(*name));
        assert_eq!(named.count(), 0, "{way}: {env:?}");
        assert!(!env["PATH"].as_str().unwrap().contains("/tmp/evil"), "{way}: {env:?}");
        assert!(!pwn.exists(), "{way}: a parameter was run");
    };
    publish(
        &management,
        "amq.default",
        "shardcron.triggers",
        json!({"job": "show", "params": params}).to_string().as_bytes(),
    );
    check("a message", &params);
    // As one word each: a key may begin like an option.
    let words = params.as_object().unwrap().iter().map(|(key, value)| format!("--param={key}={value}"));
    let words: Vec<String> = words.collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    cluster.json(&[&["trigger", "show"], words.as_slice()].concat());
    check("the command line", &params);
    let fields = ["handler", "exec", "command", "run", "env", "dir", "user", "sql", "url", "headers", "tier"];
    for field in fields {
        let message = json!({"job": "show", field: {"run": ["sh", "-c", touch], "LD_PRELOAD": "/tmp/evil.so"}});
        publish(&management, "amq.default", "shardcron.triggers", message.to_string().as_bytes());
    }
    let dead = || cluster.json(&["dead", "list"]).as_array().cloned().unwrap_or_default();
    wait_for("all of them to be refused", BOUND, || dead().len() >= fields.len());
    for field in fields {
        let named = format!("unknown field '{field}'");
        assert!(
            dead().iter().any(|d| d["reason"].as_str().is_some_and(|r| r.contains(&named))),
            "{field}: {:?}",
            dead()
        );
    }
    for name in ["LD_PRELOAD", "PATH", "PYTHONPATH"] {
        let file = cluster.path("evil.toml");
        let job = format!(
            "[job.show]\nhandler = {{ exec = {{ run = [\"python3\"], env = {{ {name} = \"/tmp/evil.so\" }} }} }}\n"
        );
        std::fs::write(&file, job).unwrap();
        let refused = cluster.cli(&["jobs", "apply", &file.display().to_string()]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && said.contains(name) && said.contains("can't set"), "{said}");
    }
    assert_eq!(executions(&cluster, "show").len(), 2, "nothing else ran");
    assert!(!pwn.exists() && !shown.exists());
}

/// Whatever a sender puts into `message_id` names its request, and never blocks what is behind it.
#[test]
fn g_06_a_message_id_of_any_length_names_the_request() {
    let (cluster, management) = cluster();
    let properties = json!({ "message_id": "x".repeat(200) });
    for _ in 0..2 {
        testkit::wait_until_some("RabbitMQ to take a message", BOUND, || {
            management.publish("amq.default", "shardcron.triggers", "demo", &properties).ok().filter(|routed| *routed)
        });
    }
    publish(&management, "amq.default", "shardcron.triggers", b"reconcile");
    wait_executions(&cluster, "reconcile", 1);
    assert_eq!(executions(&cluster, "demo").len(), 1);
}

/// `overlap = "skip"` holds for every way to fire: the second is answered with the execution in the way (O-05).
#[test]
fn o_05_a_manual_start_while_it_runs_is_skipped_with_the_running_execution() {
    let mut cluster = Cluster::on_services();
    cluster.apply("[job.long]\nhandler = { exec = [\"sleep\", \"30\"] }\n");
    cluster.start_all(1, 1);
    let running = cluster.trigger("long");
    let second = cluster.json(&["trigger", "long"]);
    assert_eq!(
        (second["outcome"].as_str(), second["execution"].as_str()),
        (Some("skipped_overlap"), Some(running.to_string().as_str()))
    );
    assert_eq!(executions(&cluster, "long").len(), 1);
}

/// A misspelt job is told at once; nothing is sent.
#[test]
fn a_misspelt_job_on_the_command_line_is_misuse() {
    let (cluster, _) = cluster();
    let output = cluster.cli(&["trigger", "recncile"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean 'reconcile'?"));
}
