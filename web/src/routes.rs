//! The routes, and what every request and every answer passes through.

use crate::access::{Access, Verdict};
use crate::callbacks;
use crate::server::WebOptions;
use crate::state::WebState;
use crate::views::{HealthView, JobsView, PendingView, WorkersView};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Serialize;
use serde_json::json;
use shardcron_store::StoreError;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// No request has a body that anybody reads.
const BODY_BYTES_MAX: u64 = 4 * 1024;
/// The longest path with its query.
const URI_BYTES_MAX: usize = 2 * 1024;

/// Open to everybody: what supervisors and load balancers ask.
const OPEN: [&str; 2] = ["/healthz", "/livez"];

const INDEX: &str = "\
shardcron
  /healthz       health of this process and of what it depends on
  /livez         200 as long as this process answers
  /metrics       metrics for Prometheus
  /workers       who is alive, draining or lost
  /jobs          jobs with their next instants
  /jobs/pending  what waits and runs
";

/// What the routes share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) state: Arc<dyn WebState>,
    pub(crate) access: Access,
    pub(crate) options: Arc<WebOptions>,
}

pub(crate) fn router(shared: Shared) -> Router {
    Router::new()
        .route("/", get(async || INDEX))
        .route("/healthz", get(healthz))
        .route("/livez", get(async || Json(json!({ "status": "ok" }))))
        .route("/metrics", get(metrics))
        .route("/workers", get(workers))
        .route("/jobs", get(jobs))
        .route("/jobs/pending", get(pending))
        .route("/callbacks/{token}", post(callbacks::answer))
        .route("/callbacks/{token}/{kind}", post(callbacks::other))
        .fallback(async || {
            refusal(StatusCode::NOT_FOUND, "there is nothing under this path; GET / lists what there is")
        })
        .layer(middleware::from_fn_with_state(shared.clone(), guard))
        .with_state(shared)
}

/// Who may pass, and with what; then the headers that every answer has.
async fn guard(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let mut response = match admit(&shared, &request) {
        Ok(()) => next.run(request).await,
        Err(refused) => *refused,
    };
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

fn admit(shared: &Shared, request: &Request) -> Result<(), Box<Response>> {
    let refuse = |status, sentence: &str| Err(Box::new(refusal(status, sentence)));
    if request.uri().path_and_query().is_some_and(|path| path.as_str().len() > URI_BYTES_MAX) {
        return refuse(StatusCode::URI_TOO_LONG, "the path is longer than anything that this server has");
    }
    if request.uri().path().starts_with(callbacks::BEGINNING) {
        if *request.method() != Method::POST {
            return not_possible("an answer is brought by POST", "POST");
        }
        return Ok(());
    }
    let verdict = shared.access.judge(request.headers());
    let open = OPEN.contains(&request.uri().path());
    match verdict {
        Verdict::WrongHost => {
            return refuse(
                StatusCode::FORBIDDEN,
                "without a token this server answers to localhost and 127.0.0.1 only; set a token",
            );
        }
        Verdict::NoToken if !open => {
            let mut refused =
                refusal(StatusCode::UNAUTHORIZED, "the token is missing or wrong; send Authorization: Bearer <token>");
            refused
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"shardcron\""));
            return Err(Box::new(refused));
        }
        Verdict::NoToken | Verdict::Allowed => {}
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return not_possible("this server only shows things; use GET or HEAD", "GET, HEAD");
    }
    if body_too_large(request.headers()) {
        return refuse(StatusCode::PAYLOAD_TOO_LARGE, "a GET request needs no body");
    }
    Ok(())
}

fn not_possible(sentence: &str, allowed: &'static str) -> Result<(), Box<Response>> {
    let mut refused = refusal(StatusCode::METHOD_NOT_ALLOWED, sentence);
    refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    Err(Box::new(refused))
}

fn body_too_large(headers: &HeaderMap) -> bool {
    let length =
        headers.get(header::CONTENT_LENGTH).map(|value| value.to_str().ok().and_then(|v| v.parse::<u64>().ok()));
    let long = length.is_some_and(|length| length.is_none_or(|bytes| bytes > BODY_BYTES_MAX));
    long || headers.contains_key(header::TRANSFER_ENCODING)
}

pub(crate) fn refusal(status: StatusCode, sentence: &str) -> Response {
    (status, Json(json!({ "error": sentence }))).into_response()
}

/// An answer within the time limit, or a sentence about why there is none.
async fn within<T, V: Serialize>(
    shared: &Shared,
    question: impl Future<Output = Result<T, StoreError>>,
    view: impl AsyncFnOnce(T) -> V,
) -> Response {
    let limit = shared.options.answer_within;
    match tokio::time::timeout(limit, question).await {
        Ok(Ok(found)) => Json(view(found).await).into_response(),
        Ok(Err(error)) => refusal(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
        Err(_) => {
            refusal(StatusCode::GATEWAY_TIMEOUT, &format!("no answer from the store within {} ms", limit.as_millis()))
        }
    }
}

async fn healthz(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    let limit = shared.options.answer_within;
    let view = match tokio::time::timeout(limit, shared.state.health()).await {
        Ok(health) => HealthView::new(health, shared.access.judge(&headers) == Verdict::Allowed),
        Err(_) => HealthView::silent(format!("health could not be found out within {} ms", limit.as_millis())),
    };
    let status = if view.is_down() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (status, Json(view)).into_response()
}

async fn metrics(State(shared): State<Shared>) -> Response {
    match &shared.options.metrics {
        Some(handle) => {
            let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            ([(header::CONTENT_TYPE, kind)], handle.render()).into_response()
        }
        None => refusal(StatusCode::NOT_FOUND, "this process records no metrics"),
    }
}

async fn workers(State(shared): State<Shared>) -> Response {
    let lost_after = shared.options.lost_after;
    within(&shared, shared.state.workers(), async |seen| WorkersView::new(seen, lost_after)).await
}

async fn pending(State(shared): State<Shared>) -> Response {
    within(&shared, shared.state.pending(), async |pending| PendingView::new(pending, now_ms())).await
}

async fn jobs(State(shared): State<Shared>) -> Response {
    let limit = shared.options.answer_within;
    let state = &shared.state;
    within(&shared, state.jobs(), async |jobs| {
        let health = tokio::time::timeout(limit, state.health()).await.ok();
        JobsView::new(jobs, health.as_ref(), now_ms())
    })
    .await
}

/// For display beside the ledger's instants.
fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
