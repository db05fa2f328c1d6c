//! Programs and services that emit the shards of a map and reduce their results: real programs, a real server, and a ledger that is
//! away where the test says.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::OneShard;
use common::server::{Server, answer};
use serde_json::{Value, json};
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::shard::FailureClass;
use shardcron_handlers::{HandlerOptions, Handlers, HttpRules};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{
    Checkpoint, CheckpointError, Effects, EmitError, Registry, ShardContext, ShardError, ShardOutput, ShardSlice,
    SubResult, async_trait,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MAP: ShardSlice = ShardSlice::Map { max: 10 };

fn worker() -> HandlerOptions {
    let owner = TestContext::new(MAP).context().owner;
    let mut options =
        HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default()).allow_exec(["sh"]);
    options.calls = HttpRules { allow: vec!["*".into()], ..HttpRules::default() };
    options
}

async fn sh(script: &str, context: ShardContext) -> Result<ShardOutput, ShardError> {
    let spec = HandlerSpec::exec(["sh", "-c", script]);
    Handlers::new(worker()).resolve(&spec)?.run(unique(context)).await
}

async fn call(server: &Server, context: ShardContext) -> Result<ShardOutput, ShardError> {
    Handlers::new(worker()).resolve(&HandlerSpec::Http(Box::new(server.spec(""))))?.run(context).await
}

/// Of an execution that no other test has: programs are found by it, on the whole machine.
fn unique(mut context: ShardContext) -> ShardContext {
    context.attempt.execution = shardcron_domain::ExecutionId(uuid::Uuid::now_v7());
    context
}

fn results(count: u32) -> Vec<SubResult> {
    let of = |number| SubResult { number, rows: Some(2), summary: Some(json!({ "found": number })) };
    (0..count).map(of).collect()
}

#[tokio::test]
async fn a_program_emits_by_lines_among_its_output() {
    let test = TestContext::new(MAP);
    let script = r#"echo "$SHARDCRON_STAGE up to $SHARDCRON_EMIT_MAX"
        echo '{"shardcron":"emit","payload":{"day":1}}'
        echo ordinary
        printf '{"shardcron":"emit","payload":"two"}\r\n{"shardcron":"emit","payload":null}\n'
        printf '{"shardcron":"result","rows":3}'"#;
    let output = sh(script, test.context()).await.unwrap();
    assert_eq!(
        test.emitted(),
        [json!({ "day": 1 }), json!("two"), Value::Null],
        "in their order, and as they were said"
    );
    assert_eq!(output.rows, Some(3));
}

#[tokio::test]
async fn a_line_that_may_have_been_a_shard_fails_the_first_shard_for_good() {
    let long = format!("x=$(head -c {} /dev/zero | tr '\\0' x)", shardcron_domain::limits::PROGRAM_LINE_BYTES);
    for (script, words) in [
        (r#"echo '{"shardcron":"emit","payload":1'"#, "EOF"),
        (r#"echo '{"shardcron":"emmit","payload":1}'"#, "emmit"),
        (&format!(r#"{long}; echo "{{\"shardcron\":\"emit\",\"payload\":\"$x\"}}""#), "longer than"),
        (r#"echo '{"shardcron":"checkpoint","at":1}'"#, "emits all shards anew"),
    ] {
        // It is ended at once, and not left to emit the rest for nothing.
        let test = TestContext::new(MAP).timeout(Duration::from_secs(60));
        let began = std::time::Instant::now();
        let error = sh(&format!("{script}; sleep 30"), test.context()).await.unwrap_err();
        assert!(error.class == FailureClass::Permanent && !error.stopped && error.message.contains(words), "{error}");
        assert!(began.elapsed() < Duration::from_secs(20), "{words}: {:?}", began.elapsed());
    }
    // Where nothing is emitted, such a line is ordinary output as ever.
    let test = TestContext::new(ShardSlice::Range { from: 1, to: 2 });
    sh(r#"echo '{"shardcron":"emmit"}'"#, test.context()).await.unwrap();
}

#[tokio::test]
async fn output_that_is_held_open_may_hide_shards() {
    let script = r#"said=$(mktemp); echo '{"shardcron":"emit","payload":1}'
        setsid sh -c "echo out > $said; exec sleep 3" & while ! [ -s "$said" ]; do :; done; rm "$said""#;
    let error = sh(script, TestContext::new(MAP).context()).await.unwrap_err();
    assert!(error.class == FailureClass::Transient && error.message.contains("would be lost"), "{error}");
}

/// The ledger answers nothing but "away" some times, and then takes or refuses.
struct Away {
    times: AtomicUsize,
    refusal: Option<fn() -> EmitError>,
    taken: Mutex<Vec<Value>>,
}

impl Away {
    fn for_some(times: usize, refusal: Option<fn() -> EmitError>) -> Arc<Self> {
        Arc::new(Away { times: AtomicUsize::new(times), refusal, taken: Mutex::default() })
    }
}

#[async_trait]
impl Effects for Away {
    async fn checkpoint(&self, _: Option<Checkpoint>, _: Checkpoint, _: u64) -> Result<(), CheckpointError> {
        Ok(())
    }

    async fn emit(&self, payload: Value) -> Result<(), EmitError> {
        if self.times.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok() {
            return Err(EmitError::Unavailable("cut off by the test".into()));
        }
        match self.refusal {
            Some(refusal) => Err(refusal()),
            None => {
                self.taken.lock().unwrap().push(payload);
                Ok(())
            }
        }
    }
}

fn over(effects: &Arc<Away>) -> ShardContext {
    let mut context = TestContext::new(MAP).context();
    context.effects = effects.clone();
    context
}

const TWO: &str = r#"echo '{"shardcron":"emit","payload":1}'; echo '{"shardcron":"emit","payload":2}'"#;

#[tokio::test]
async fn shards_wait_for_a_ledger_that_is_away() {
    // 0.1 + 0.2 + 0.4 + 0.8 s: longer than the output of an ended program is waited for otherwise.
    let effects = Away::for_some(4, None);
    sh(TWO, over(&effects)).await.unwrap();
    assert_eq!(*effects.taken.lock().unwrap(), [json!(1), json!(2)], "the program had ended long before");
    let server = Server::answering(&[&answer("200 OK", "", r#"{"emit":[1,2]}"#)]).await;
    let effects = Away::for_some(1, None);
    call(&server, over(&effects)).await.unwrap();
    assert_eq!(*effects.taken.lock().unwrap(), [json!(1), json!(2)]);
}

#[tokio::test]
async fn a_program_that_ended_well_with_shards_unkept_is_not_done() {
    for stopping in [false, true] {
        let effects =
            Away::for_some(if stopping { 1_000 } else { 0 }, Some(|| EmitError::Refused("one too many".into())));
        let context = over(&effects);
        let stop = context.stop.clone();
        let running = tokio::spawn(async move { sh(TWO, context).await });
        if stopping {
            while effects.times.load(Ordering::Acquire) > 998 {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        }
        let error = running.await.unwrap().unwrap_err();
        assert_eq!(error.stopped, stopping, "{error}");
        assert!(
            stopping || (error.class == FailureClass::Permanent && error.message.contains("one too many")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_program_reduces_what_its_input_holds() {
    let test = TestContext::new(MAP).reducing(results(3));
    let script = r#"grep -c found "$SHARDCRON_INPUT"; echo "$SHARDCRON_STAGE of $SHARDCRON_TASKS""#;
    let output = sh(script, test.context()).await.unwrap();
    assert_eq!(output.summary.unwrap()["stdout"], "3\nreduce of 3\n", "one a line, for those who have no JSON");
    let copy = tempfile::NamedTempFile::new().unwrap();
    sh(&format!("cat \"$SHARDCRON_INPUT\" > {}", copy.path().display()), test.context()).await.unwrap();
    let input: Value = serde_json::from_reader(copy.reopen().unwrap()).unwrap();
    assert_eq!(input["results"][2], json!({ "number": 2, "rows": 2, "summary": { "found": 2 } }));
    assert_eq!(input["slice"], json!({ "reduce": { "tasks": 3 } }));
}

#[tokio::test]
async fn a_sub_task_finds_its_payload() {
    let task = |payload: Value| TestContext::new(ShardSlice::Task { number: 4, payload });
    let script = r#"printf '%s %s %s' "$SHARDCRON_STAGE" "$SHARDCRON_TASK_NUMBER" "$SHARDCRON_TASK""#;
    for (payload, said) in [(json!("EWR"), "task 4 EWR"), (json!({ "a": [1] }), r#"task 4 {"a":[1]}"#)] {
        let output = sh(script, task(payload).context()).await.unwrap();
        assert_eq!(output.summary.unwrap()["stdout"], said);
    }
    let error = sh(TWO, EmitsNothing::context()).await.unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("only the first shard"), "{error}");
}

/// What a worker says of a shard that is no map's first.
struct EmitsNothing;

impl EmitsNothing {
    fn context() -> ShardContext {
        let refusal =
            || EmitError::Refused("only the first shard of a job with shards = { map = {} } emits shards".into());
        let mut context = TestContext::new(ShardSlice::Task { number: 0, payload: Value::Null }).context();
        context.effects = Away::for_some(0, Some(refusal));
        context
    }
}

#[tokio::test]
async fn a_service_emits_by_its_answer_at_once_or_later() {
    let said = answer("200 OK", "", r#"{"emit":[{"day":1},{"day":2}],"rows":2}"#);
    let at_once = Server::answering(&[&said]).await;
    let later = Server::answering(&[
        &answer("202 Accepted", "location: /jobs/7\r\nretry-after: 0\r\n", ""),
        &answer("202 Accepted", "", ""),
        &said,
    ])
    .await;
    for server in [&at_once, &later] {
        let test = TestContext::new(MAP);
        assert_eq!(call(server, test.context()).await, Ok(ShardOutput::rows(2)));
        assert_eq!(test.emitted(), [json!({ "day": 1 }), json!({ "day": 2 })]);
    }
    // An answer of another kind is not taken for "no shards".
    let other = Server::answering(&[&answer("200 OK", "", r#"{"rows":2}"#)]).await;
    let error = call(&other, TestContext::new(MAP).context()).await.unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("a list 'emit'"), "{error}");
    // More than an ordinary answer may hold.
    let many = json!({ "emit": vec!["x".repeat(1_000); 1_000] }).to_string();
    let large = Server::answering(&[&answer("200 OK", "", &many)]).await;
    let test = TestContext::new(MAP);
    call(&large, test.context()).await.unwrap();
    assert_eq!(test.emitted().len(), 1_000);
}

#[tokio::test]
async fn a_service_reduces_what_the_body_holds() {
    let server = Server::answering(&[&answer("200 OK", "", r#"{"rows":6}"#)]).await;
    for attempt in [1, 2] {
        let mut context = TestContext::new(MAP).reducing(results(3)).context();
        context.attempt.attempt = attempt;
        assert_eq!(call(&server, context).await, Ok(ShardOutput::rows(6)));
    }
    let seen = server.seen();
    let body: Value = serde_json::from_str(&seen[0].body).unwrap();
    assert_eq!(body["results"].as_array().unwrap().len(), 3);
    assert_eq!(body["results"][1], json!({ "number": 1, "rows": 2, "summary": { "found": 1 } }));
    assert_eq!(seen[0].body, seen[1].body, "the same for every attempt");
}
