//! One request and its answer: bounded in time and size, never redirected, and given up when the attempt is told to stop.

use super::tls;
use http::header::{HeaderMap, HeaderValue};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use shardcron_domain::metric_names::{HTTP_REQUESTS, LABEL_OUTCOME};
use std::error::Error as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How long a connection that nobody uses is kept.
const IDLE: Duration = Duration::from_secs(30);
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

type Plain = Client<HttpConnector, Full<Bytes>>;
type Secure = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// The clients of a worker, made when they are first needed: for one, the machine's certificates are read.
#[derive(Default)]
pub(super) struct Clients {
    plain: OnceLock<Plain>,
    secure: OnceLock<Result<Secure, String>>,
    /// A file of certificates that are trusted beside the machine's own.
    authorities: Option<PathBuf>,
}

/// What a service answered.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// As much of it as is kept.
    pub(super) body: Vec<u8>,
    /// There was more.
    pub(super) cut: bool,
}

impl Answer {
    /// A header's text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok().map(str::trim)
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// No connection could be made: the service has seen nothing.
    NotReached(String),
    /// It does not prove that it is who it should be: why, and what to do. It has seen nothing.
    NotTrusted(String),
    /// The service may have seen the request, and done what it asks for.
    Unknown(String),
    /// It can't be sent at all.
    Impossible(String),
    /// The attempt was told to stop.
    Stopped,
}

/// What is asked.
pub(super) struct Question<'a> {
    pub(super) method: &'a str,
    pub(super) url: &'a str,
    pub(super) headers: &'a HeaderMap,
    pub(super) body: Option<Bytes>,
    /// Bytes of the answer that are read.
    pub(super) keep: usize,
}

impl Clients {
    pub(super) fn trusting(authorities: Option<PathBuf>) -> Self {
        Clients { authorities, ..Clients::default() }
    }

    fn plain(&self) -> &Plain {
        self.plain.get_or_init(|| builder().build(connector()))
    }

    fn secure(&self) -> Result<&Secure, NoAnswer> {
        let made = self.secure.get_or_init(|| {
            let mut connector = connector();
            // The connector above it decides by the scheme.
            connector.enforce_http(false);
            let tls = HttpsConnectorBuilder::new().with_tls_config(tls::config(self.authorities.as_deref())?);
            Ok(builder().build(tls.https_only().enable_http1().wrap_connector(connector)))
        });
        made.as_ref().map_err(|why| NoAnswer::Impossible(why.clone()))
    }

    /// Asks once. The answer has to be there within `limit`, with its body.
    pub(super) async fn ask(
        &self,
        question: &Question<'_>,
        limit: Duration,
        stop: &CancellationToken,
    ) -> Result<Answer, NoAnswer> {
        let answer = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(NoAnswer::Stopped),
            answer = tokio::time::timeout(limit, self.exchange(question)) => answer,
        };
        let answer =
            answer.unwrap_or_else(|_| Err(NoAnswer::Unknown(format!("there was no whole answer within {limit:?}"))));
        metrics::counter!(HTTP_REQUESTS, LABEL_OUTCOME => outcome(&answer)).increment(1);
        answer
    }

    async fn exchange(&self, question: &Question<'_>) -> Result<Answer, NoAnswer> {
        let impossible = |e: http::Error| NoAnswer::Impossible(e.to_string());
        let uri: Uri = question.url.parse().map_err(|e: http::uri::InvalidUri| impossible(e.into()))?;
        let secure = uri.scheme_str() == Some("https");
        let mut request = Request::builder().method(question.method).uri(uri);
        if let Some(headers) = request.headers_mut() {
            headers.extend(question.headers.clone());
            headers.insert("user-agent", HeaderValue::from_static(concat!("shardcron/", env!("CARGO_PKG_VERSION"))));
        }
        let request = request.body(Full::new(question.body.clone().unwrap_or_default())).map_err(impossible)?;
        let sent = if secure { self.secure()?.request(request) } else { self.plain().request(request) };
        let answer = sent.await.map_err(|e| {
            let why = e.source().map_or_else(|| e.to_string(), |source| innermost(source).to_string());
            if let Some(refusal) = e.source().and_then(tls::refusal) {
                return NoAnswer::NotTrusted(refusal);
            }
            if e.is_connect() { NoAnswer::NotReached(why) } else { NoAnswer::Unknown(why) }
        })?;
        let (head, mut body) = answer.into_parts();
        let (mut kept, mut cut) = (Vec::new(), false);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| NoAnswer::Unknown(format!("the answer broke off: {e}")))?;
            let Some(bytes) = frame.data_ref() else { continue };
            let room = question.keep - kept.len();
            kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
            if bytes.len() > room {
                // Dropped unread, and the connection with it.
                cut = true;
                break;
            }
        }
        Ok(Answer { status: head.status, headers: head.headers, body: kept, cut })
    }
}

/// A request is sent once: whether it may be sent again is decided above.
fn builder() -> hyper_util::client::legacy::Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    builder.pool_idle_timeout(IDLE).pool_max_idle_per_host(16).pool_timer(TokioTimer::new()).http1_max_headers(100);
    builder
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_nodelay(true);
    connector
}

fn innermost<'e>(error: &'e (dyn std::error::Error + 'static)) -> &'e (dyn std::error::Error + 'static) {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error
}

fn outcome(answer: &Result<Answer, NoAnswer>) -> &'static str {
    match answer {
        Ok(answer) => match answer.status.as_u16() / 100 {
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            5 => "5xx",
            _ => "other",
        },
        Err(_) => "error",
    }
}
