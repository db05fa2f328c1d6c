//! Sorts lapin's errors by what the caller does about them.

use crate::port::BrokerError;
use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use std::future::Future;

/// What the server refuses it will refuse again; everything else may pass.
pub(super) fn sort(error: &lapin::Error) -> BrokerError {
    let ErrorKind::ProtocolError(amqp) = error.kind() else {
        return BrokerError::Unavailable(error.to_string());
    };
    let text = amqp.get_message().to_string();
    match amqp.kind() {
        AMQPErrorKind::Soft(
            AMQPSoftError::ACCESSREFUSED | AMQPSoftError::PRECONDITIONFAILED | AMQPSoftError::RESOURCELOCKED,
        )
        | AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED | AMQPHardError::NOTIMPLEMENTED) => BrokerError::Refused(text),
        _ => BrokerError::Unavailable(text),
    }
}

/// Whether a queue or exchange is not there.
pub(super) fn is_not_found(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(e) if matches!(e.kind(), AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)))
}

/// A request to the server, bounded.
pub(super) async fn bounded<T>(request: impl Future<Output = lapin::Result<T>>) -> Result<T, BrokerError> {
    raw_bounded(request).await?.map_err(|e| sort(&e))
}

/// The same, for callers that look into the error.
pub(super) async fn raw_bounded<T>(
    request: impl Future<Output = lapin::Result<T>>,
) -> Result<lapin::Result<T>, BrokerError> {
    tokio::time::timeout(super::RPC_TIMEOUT, request)
        .await
        .map_err(|_| BrokerError::Unavailable(format!("no answer within {} s", super::RPC_TIMEOUT.as_secs())))
}
