//! The http handler against a real server on this machine, which answers what the test says.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::OneShard;
use common::server::{Server, answer};
use serde_json::json;
use shardcron_domain::http_call::HttpSpec;
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::shard::FailureClass;
use shardcron_handlers::{HandlerOptions, Handlers};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Checkpoint, Registry, ShardError, ShardOutput, ShardSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANGE: ShardSlice = ShardSlice::Range { from: 5, to: 9 };

fn worker(allow: &str) -> HandlerOptions {
    let owner = TestContext::new(RANGE).context().owner;
    let mut options = HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default());
    options.calls.allow = vec![allow.to_owned()];
    options
}

async fn call(worker: HandlerOptions, spec: HttpSpec, test: &TestContext) -> Result<ShardOutput, ShardError> {
    Handlers::new(worker).resolve(&HandlerSpec::Http(Box::new(spec)))?.run(test.context()).await
}

#[tokio::test]
async fn every_attempt_sends_the_same_key_and_the_same_body() {
    let server = Server::answering(&[&answer("200 OK", "", r#"{"rows":5,"summary":{"unmatched":2}}"#)]).await;
    let first = TestContext::new(RANGE).param("date", "2013-01-31").timeout(Duration::from_secs(60));
    let second = first.clone().resumed(2, Checkpoint::Text("elsewhere".into()));
    for test in [&first, &second] {
        let output = call(worker(&server.url), server.spec(""), test).await.unwrap();
        assert_eq!((output.rows, output.summary), (Some(5), Some(json!({ "unmatched": 2 }))));
    }
    let seen = server.seen();
    assert!(seen.iter().all(|s| s.line == "POST /settle HTTP/1.1"), "{seen:?}");
    let keys: Vec<_> = seen.iter().map(|s| s.header("idempotency-key").unwrap()).collect();
    assert_eq!(keys, [first.context().idempotency_key(), first.context().idempotency_key()]);
    assert_eq!(seen[0].body, seen[1].body, "byte by byte");
    let attempts: Vec<_> = seen.iter().map(|s| s.header("shardcron-attempt").unwrap()).collect();
    assert_eq!(attempts, ["1", "2"]);
    let body: serde_json::Value = serde_json::from_str(&seen[0].body).unwrap();
    assert_eq!(body["slice"], json!({ "range": { "from": 5, "to": 9 } }));
    assert_eq!((&body["params"]["date"], &body["shards_total"]), (&json!("2013-01-31"), &json!(1)));
}

#[tokio::test]
async fn only_what_was_not_reached_is_repeated_within_an_attempt() {
    // Somebody must have had the port, so that nobody has it now.
    let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let nobody: HttpSpec = serde_json::from_str(&format!(r#"{{"url":"http://127.0.0.1:{port}/"}}"#)).unwrap();
    let began = Instant::now();
    let error = call(worker("*"), nobody, &TestContext::new(RANGE)).await.unwrap_err();
    assert!(error.class == FailureClass::Transient && error.message.contains("can't be reached"), "{error}");
    assert!(began.elapsed() >= Duration::from_millis(1_200), "it was tried again: {:?}", began.elapsed());
    // It read the request and hung up: it may have done it.
    for broken in ["HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "garbage\r\n\r\n"] {
        let server = Server::answering(&[broken]).await;
        let error = call(worker("*"), server.spec(""), &TestContext::new(RANGE)).await.unwrap_err();
        assert!(error.class == FailureClass::Transient && error.message.contains("not known"), "{error}");
        assert_eq!(server.seen().len(), 1, "{broken}: not repeated here");
    }
}

#[tokio::test]
async fn timeouts_and_stops_give_the_request_up() {
    let server = Server::answering(&[""]).await;
    let began = Instant::now();
    let error = call(worker("*"), server.spec(r#","timeout":"300ms""#), &TestContext::new(RANGE)).await.unwrap_err();
    assert!(error.class == FailureClass::Transient && error.message.contains("300ms"), "{error}");
    let overdue = TestContext::new(RANGE).timeout(Duration::from_millis(300));
    let error = call(worker("*"), server.spec(""), &overdue).await.unwrap_err();
    assert!(!error.stopped && error.message.contains("answer within"), "{error:?}");
    let stopped = TestContext::new(RANGE);
    let running = tokio::spawn({
        let (test, spec) = (stopped.clone(), server.spec(""));
        async move { call(worker("*"), spec, &test).await }
    });
    while server.seen().len() < 3 {
        tokio::task::yield_now().await;
    }
    stopped.stop();
    assert!(running.await.unwrap().unwrap_err().stopped);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_service_that_works_on_is_asked_until_it_is_done() {
    let server = Server::answering(&[
        &answer("202 Accepted", "location: /jobs/7\r\nretry-after: 0\r\n", ""),
        &answer("202 Accepted", "", "10 %"),
        &answer("503 Busy", "", ""),
        &answer("303 See Other", "location: {url}/results/7\r\n", ""),
        &answer("200 OK", "", r#"{"rows":5}"#),
    ])
    .await;
    let test = TestContext::new(RANGE);
    assert_eq!(call(worker("*"), server.spec(""), &test).await, Ok(ShardOutput::rows(5)));
    let lines: Vec<String> = server.seen().into_iter().map(|s| s.line).collect();
    let get = |path: &str| format!("GET {path} HTTP/1.1");
    assert_eq!(
        lines,
        ["POST /settle HTTP/1.1".to_owned(), get("/jobs/7"), get("/jobs/7"), get("/jobs/7"), get("/results/7")]
    );
    // The next attempt goes on asking.
    let (at, _) = test.checkpoints()[0].clone();
    assert_eq!(at, Checkpoint::Text(format!("asked at {}/jobs/7", server.url)));
    let again = TestContext::new(RANGE).resumed(2, at.clone());
    assert_eq!(call(worker("*"), server.spec(""), &again).await, Ok(ShardOutput::rows(5)));
    assert_eq!(server.seen().last().unwrap().line, get("/jobs/7"), "no second POST");
    // Forgotten there: the attempt after it begins anew.
    let forgetful = Server::answering(&[&answer("404 Not Found", "", "")]).await;
    let at = Checkpoint::Text(format!("asked at {}/jobs/7", forgetful.url));
    let test = TestContext::new(RANGE).resumed(2, at);
    let error = call(worker("*"), forgetful.spec(""), &test).await.unwrap_err();
    assert!(error.class == FailureClass::Transient && error.message.contains("forgotten"), "{error}");
    let (at, _) = test.checkpoints()[0].clone();
    let test = TestContext::new(RANGE).resumed(3, at);
    call(worker("*"), forgetful.spec(""), &test).await.unwrap_err();
    assert_eq!(forgetful.seen().last().unwrap().line, "POST /settle HTTP/1.1");
}

#[tokio::test]
async fn a_service_is_told_when_its_work_is_not_wanted_any_more() {
    let server =
        Server::answering(&[&answer("202 Accepted", "location: /jobs/7\r\n", ""), &answer("202 Accepted", "", "")])
            .await;
    let overdue = TestContext::new(RANGE).timeout(Duration::from_millis(400));
    let error = call(worker("*"), server.spec(""), &overdue).await.unwrap_err();
    assert_eq!((error.class, error.stopped), (FailureClass::Timeout, false), "{error}");
    assert_eq!(server.seen().last().unwrap().line, "DELETE /jobs/7 HTTP/1.1");
    // A worker that shuts down leaves it to the next attempt.
    let stopped = TestContext::new(RANGE).resumed(2, Checkpoint::Text(format!("asked at {}/jobs/7", server.url)));
    let before = server.seen().len();
    let running = tokio::spawn({
        let (test, spec) = (stopped.clone(), server.spec(""));
        async move { call(worker("*"), spec, &test).await }
    });
    while server.seen().len() == before {
        tokio::task::yield_now().await;
    }
    stopped.stop();
    assert!(running.await.unwrap().unwrap_err().stopped);
    assert!(server.seen().iter().skip(before).all(|s| s.line.starts_with("GET")));
}

#[tokio::test]
async fn redirects_and_other_hosts_are_refused() {
    let elsewhere = Server::answering(&[&answer("200 OK", "", "stolen")]).await;
    let there = elsewhere.url.clone();
    for (status, location) in
        [("302 Found", "/x"), ("307 Temporary Redirect", &there), ("202 Accepted", &there), ("303 See Other", &there)]
    {
        let server = Server::answering(&[&answer(status, &format!("location: {location}\r\n"), "")]).await;
        let error = call(worker("*"), server.spec(""), &TestContext::new(RANGE)).await.unwrap_err();
        assert_eq!(error.class, FailureClass::Permanent, "{status}: {error}");
    }
    assert_eq!(elsewhere.seen().len(), 0, "nobody asked there");
    let error =
        call(worker("https://api.example.com"), elsewhere.spec(""), &TestContext::new(RANGE)).await.unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("allow_http"), "{error}");
    // A checkpoint that names another place, from another version of the job, is not followed.
    let server = Server::answering(&[&answer("200 OK", "", r#"{"rows":1}"#)]).await;
    let test = TestContext::new(RANGE).resumed(2, Checkpoint::Text(format!("asked at {there}/jobs/7")));
    assert_eq!(call(worker("*"), server.spec(""), &test).await, Ok(ShardOutput::rows(1)));
    assert_eq!((elsewhere.seen().len(), server.seen().len()), (0, 1));
}

#[tokio::test]
async fn z_05_secrets_come_from_the_worker_and_are_not_told() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "s3cret\n").unwrap();
    let source = format!("file:{}", file.display());
    let server = Server::answering(&[&answer("401 Unauthorized", "", "no"), &answer("200 OK", "", "")]).await;
    let headers = format!(
        r#","headers":{{"Authorization":{{"file":"{}","prefix":"Bearer "}},"X-Kind":"night","X-Env":{{"env":"CARGO_PKG_NAME"}}}}"#,
        file.display()
    );
    let spec = server.spec(&headers);
    let test = TestContext::new(RANGE);
    let error = call(worker("*"), spec.clone(), &test).await.unwrap_err();
    assert!(error.class == FailureClass::Permanent && error.message.contains("allow_secrets"), "{error}");
    assert_eq!(server.seen().len(), 0, "not without the worker's consent");
    let mut consenting = worker("*");
    consenting.calls.secrets = vec![source, "env:CARGO_PKG_NAME".into()];
    let error = call(consenting.clone(), spec.clone(), &test).await.unwrap_err();
    assert!(error.message.contains("401") && !error.message.contains("s3cret"), "{error}");
    call(consenting.clone(), spec.clone(), &test).await.unwrap();
    let seen = server.seen();
    assert_eq!(seen[1].header("authorization"), Some("Bearer s3cret"));
    assert_eq!((seen[1].header("x-kind"), seen[1].header("x-env")), (Some("night"), Some("shardcron-handlers")));
    std::fs::remove_file(&file).unwrap();
    let error = call(consenting, spec, &test).await.unwrap_err();
    assert!(
        error.class == FailureClass::Transient && error.message.contains("can't be read at this worker"),
        "{error}"
    );
}

#[tokio::test]
async fn b_02_a_large_answer_is_cut() {
    let body = "x".repeat(3 << 20);
    let server = Server::answering(&[&answer("200 OK", "", &body)]).await;
    let output = call(worker("*"), server.spec(""), &TestContext::new(RANGE)).await.unwrap();
    let summary = output.summary.unwrap();
    assert_eq!(summary["truncated"], true);
    assert!(summary["text"].as_str().unwrap().len() <= 128 * 1024);
}
