//! Starting and ending the server.

use crate::access::Access;
use crate::callbacks::CallbackDesk;
use crate::listener::Bounded;
use crate::routes::{self, Shared};
use crate::state::WebState;
use metrics_exporter_prometheus::PrometheusHandle;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long open requests may go on at the end.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// What the server is to be.
#[derive(Clone)]
pub struct WebOptions {
    /// Where to listen. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// What a request has to show as `Authorization: Bearer …`; needed for any address but loopback.
    pub token: Option<String>,
    /// After which age of its last beat a worker counts as lost.
    pub lost_after: Duration,
    /// How long an answer may take to be put together.
    pub answer_within: Duration,
    /// The process's metrics.
    pub metrics: Option<PrometheusHandle>,
    /// Who takes what services bring, in a process that runs handlers.
    pub callbacks: Option<Arc<dyn CallbackDesk>>,
}

impl WebOptions {
    /// On this address, with the defaults.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        WebOptions {
            listen,
            token: None,
            lost_after: Duration::from_secs(15),
            answer_within: Duration::from_secs(5),
            metrics: None,
            callbacks: None,
        }
    }
}

impl fmt::Debug for WebOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "(hidden)");
        f.debug_struct("WebOptions").field("listen", &self.listen).field("token", &token).finish_non_exhaustive()
    }
}

/// What can go wrong at the start.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// The configuration would be unsafe. Says what to change.
    #[error("{0}")]
    Refused(String),
    /// The address can't be had.
    #[error("can't listen on {listen}: {source}; choose another address, or end what listens there")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The metrics can't be recorded.
    #[error("the metrics can't be recorded: {0}")]
    Metrics(String),
}

/// A running server. Dropped, it ends.
#[derive(Debug)]
pub struct WebHandle {
    local_addr: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl WebHandle {
    /// Where it listens, with the port that it got.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Takes no more requests and waits a moment for those that are open.
    pub async fn shutdown(mut self) {
        self.stop.cancel();
        if tokio::time::timeout(SHUTDOWN, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

impl Drop for WebHandle {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Starts the server on the runtime that this is called on.
///
/// # Errors
/// The address is open to other machines and there is no good token, or it can't be had.
pub async fn serve(options: WebOptions, state: Arc<dyn WebState>) -> Result<WebHandle, WebError> {
    let listen = options.listen;
    let access = Access::new(listen, options.token.clone()).map_err(WebError::Refused)?;
    let failed = |source| WebError::Listen { listen, source };
    let listener = tokio::net::TcpListener::bind(listen).await.map_err(failed)?;
    let local_addr = listener.local_addr().map_err(failed)?;
    let router = routes::router(Shared { state, access, options: Arc::new(options) });
    let stop = CancellationToken::new();
    let ended = stop.clone().cancelled_owned();
    let task = tokio::spawn(async move {
        if let Err(error) = axum::serve(Bounded::new(listener), router).with_graceful_shutdown(ended).await {
            tracing::error!(%error, "the web server ended");
        }
    });
    tracing::info!(%local_addr, "web server listens");
    Ok(WebHandle { local_addr, stop, task })
}
