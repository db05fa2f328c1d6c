//! Services that bring their answer themselves, and services that have to prove who they are: a real server, and the worker's real side
//! of the door.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::OneShard;
use common::server::{Server, answer};
use serde_json::json;
use shardcron_domain::http_call::HttpSpec;
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::shard::FailureClass;
use shardcron_handlers::{Callbacks, HandlerOptions, Handlers};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardOutput, ShardSlice};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

const RANGE: ShardSlice = ShardSlice::Range { from: 5, to: 9 };
const BASE: &str = "http://worker.example:8081";

fn worker(callbacks: &Arc<Callbacks>) -> Handlers {
    let owner = TestContext::new(RANGE).context().owner;
    let mut options = HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default());
    options.calls.allow = vec!["*".to_owned()];
    options.calls.callbacks = callbacks.clone();
    Handlers::new(options)
}

fn desk() -> Arc<Callbacks> {
    let callbacks = Arc::new(Callbacks::default());
    callbacks.reached_at(BASE);
    callbacks
}

/// Runs an attempt beside the test.
fn begin(
    callbacks: &Arc<Callbacks>,
    spec: HttpSpec,
    context: ShardContext,
) -> JoinHandle<Result<ShardOutput, ShardError>> {
    let handler = worker(callbacks).resolve(&HandlerSpec::Http(Box::new(spec))).unwrap();
    tokio::spawn(async move { handler.run(context).await })
}

/// The address that the server was told by its n-th request, as the web server hands it on.
async fn told(server: &Server, n: usize) -> String {
    while server.seen().len() <= n {
        tokio::task::yield_now().await;
    }
    let url = server.seen()[n].header("shardcron-callback").unwrap().to_owned();
    url.strip_prefix(&format!("{BASE}/callbacks/")).unwrap().to_owned()
}

const CALLBACK: &str = r#","callback":true"#;

#[tokio::test]
async fn a_service_calls_back_without_ever_being_asked() {
    let server = Server::answering(&[&answer("202 Accepted", "", "")]).await;
    let callbacks = desk();
    let running = begin(&callbacks, server.spec(CALLBACK), TestContext::new(RANGE).context());
    let token = told(&server, 0).await;
    assert_eq!(callbacks.take(&token, "progress", b"").status, 202);
    let body = br#"{"rows":5,"summary":{"unmatched":2}}"#;
    assert_eq!(callbacks.take(&token, "", body).status, 202);
    let output = running.await.unwrap().unwrap();
    assert_eq!((output.rows, output.summary), (Some(5), Some(json!({ "unmatched": 2 }))));
    assert_eq!(server.seen().len(), 1, "nobody asked");
    assert_eq!(callbacks.take(&token, "", body).status, 202, "the same again is told the same");
    assert_eq!(callbacks.take(&token, "", b"{}").status, 409);
}

#[tokio::test]
async fn the_first_answer_wins_asked_for_or_brought() {
    // Brought, while the service would be asked for a long time yet.
    let busy = Server::answering(&[&answer("202 Accepted", "location: /jobs/7\r\n", "")]).await;
    let callbacks = desk();
    let running = begin(&callbacks, busy.spec(CALLBACK), TestContext::new(RANGE).context());
    let token = told(&busy, 0).await;
    while busy.seen().len() < 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!(callbacks.take(&token, "", br#"{"rows":1}"#).status, 202);
    assert_eq!(running.await.unwrap(), Ok(ShardOutput::rows(1)));
    assert!(busy.seen()[1..].iter().all(|s| s.header("shardcron-callback").is_none()), "told once");
    // Asked for: who brings it now comes too late.
    let quick = Server::answering(&[
        &answer("202 Accepted", "location: /jobs/7\r\n", ""),
        &answer("200 OK", "", r#"{"rows":2}"#),
    ])
    .await;
    let running = begin(&callbacks, quick.spec(CALLBACK), TestContext::new(RANGE).context());
    let token = told(&quick, 0).await;
    assert_eq!(running.await.unwrap(), Ok(ShardOutput::rows(2)));
    assert_eq!(callbacks.take(&token, "", br#"{"rows":1}"#).status, 410);
    // And before the service has even answered the request.
    let silent = Server::answering(&[""]).await;
    let running = begin(&callbacks, silent.spec(CALLBACK), TestContext::new(RANGE).context());
    let token = told(&silent, 0).await;
    assert_eq!(callbacks.take(&token, "fail", br#"{"message":"closed","class":"permanent"}"#).status, 202);
    let error = running.await.unwrap().unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("closed"), "{error}");
}

#[tokio::test]
async fn another_attempt_has_another_address_and_the_same_body() {
    let server = Server::answering(&[&answer("202 Accepted", "", "")]).await;
    let before = desk();
    let first = begin(&before, server.spec(CALLBACK), TestContext::new(RANGE).context());
    let old = told(&server, 0).await;
    // Its worker is lost; another one has the next attempt.
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let after = desk();
    let mut context = TestContext::new(RANGE).context();
    context.attempt.attempt = 2;
    let second = begin(&after, server.spec(CALLBACK), context);
    let new = told(&server, 1).await;
    for desk in [&before, &after] {
        let late = desk.take(&old, "", br#"{"rows":1}"#);
        assert!(late.status == 410 && late.sentence.contains("another Shardcron-Callback"), "{late:?}");
    }
    assert_eq!(after.take(&new, "", br#"{"rows":2}"#).status, 202);
    assert_eq!(second.await.unwrap(), Ok(ShardOutput::rows(2)));
    let seen = server.seen();
    assert_eq!(seen[0].body, seen[1].body, "the address is a header: a service that remembers keys may compare bodies");
    assert!(!seen[0].body.contains("callback"));
}

#[tokio::test]
async fn a_map_is_brought_too_and_time_runs_out() {
    let server = Server::answering(&[&answer("202 Accepted", "", "")]).await;
    let callbacks = desk();
    let test = TestContext::new(ShardSlice::Map { max: 9 });
    let running = begin(&callbacks, server.spec(CALLBACK), test.context());
    let token = told(&server, 0).await;
    assert_eq!(callbacks.take(&token, "", br#"{"emit":[1,2]}"#).status, 202);
    running.await.unwrap().unwrap();
    assert_eq!(test.emitted(), [json!(1), json!(2)]);
    // Nobody calls: the job's timeout ends it, as everything else.
    let short = TestContext::new(RANGE).timeout(Duration::from_millis(300));
    let running = begin(&callbacks, server.spec(CALLBACK), short.context());
    let token = told(&server, 1).await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!((error.class, error.stopped), (FailureClass::Timeout, false), "{error}");
    assert_eq!(callbacks.take(&token, "", b"{}").status, 410);
    // Without the job's word nothing is told, and 202 without a Location leads nowhere.
    let error = begin(&callbacks, server.spec(""), TestContext::new(RANGE).context()).await.unwrap().unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("callback = true"), "{error}");
    assert_eq!(server.seen().last().unwrap().header("shardcron-callback"), None);
}
