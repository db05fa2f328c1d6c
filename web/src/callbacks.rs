//! What services bring to the handlers of this process: the one thing that this server takes in.
//!
//! The address holds a secret of its own, which is what lets somebody in; neither the server's token nor a loopback name is asked for.
//! Nothing of a body is read before the address is found to be good.

use crate::routes::{Shared, refusal};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::time::Duration;

/// What the paths begin with.
pub(crate) const BEGINNING: &str = "/callbacks/";

/// How long a body may take to come.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// Who takes what services bring. Answers at once.
pub trait CallbackDesk: Send + Sync {
    /// Bytes that may be brought to this address, by its last part.
    ///
    /// # Errors
    /// Nobody waits there: the status and the sentence to answer with.
    fn admit(&self, token: &str) -> Result<usize, (u16, String)>;

    /// Takes what was brought; `kind` is what follows the address. The status and the sentence to answer with.
    fn take(&self, token: &str, kind: &str, body: &[u8]) -> (u16, String);
}

pub(crate) async fn answer(shared: State<Shared>, Path(token): Path<String>, body: Body) -> Response {
    take(&shared, &token, "", body).await
}

pub(crate) async fn other(shared: State<Shared>, Path((token, kind)): Path<(String, String)>, body: Body) -> Response {
    take(&shared, &token, &kind, body).await
}

async fn take(shared: &Shared, token: &str, kind: &str, body: Body) -> Response {
    let Some(desk) = &shared.options.callbacks else {
        return refusal(StatusCode::NOT_FOUND, "this process runs no handlers, so nobody calls back here");
    };
    let most = match desk.admit(token) {
        Ok(most) => most,
        Err(refused) => return replied(refused),
    };
    let read = tokio::time::timeout(BODY_WITHIN, axum::body::to_bytes(body, most)).await;
    match read {
        Ok(Ok(bytes)) => replied(desk.take(token, kind, &bytes)),
        Ok(Err(_)) => refusal(
            StatusCode::PAYLOAD_TOO_LARGE,
            &format!(
                "the body broke off, or has more than the {most} bytes that are possible; say where the data is, and not the data"
            ),
        ),
        Err(_) => {
            refusal(StatusCode::REQUEST_TIMEOUT, &format!("the body did not come within {} s", BODY_WITHIN.as_secs()))
        }
    }
}

fn replied((status, sentence): (u16, String)) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if !status.is_success() {
        return closing(refusal(status, &sentence));
    }
    (status, axum::Json(serde_json::json!({ "said": sentence }))).into_response()
}

/// What was refused may still have a body on its way, which nobody reads.
fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, axum::http::HeaderValue::from_static("close"));
    response
}
