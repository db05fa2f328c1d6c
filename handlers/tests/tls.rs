//! Calls over https, against a real server with certificates of a private authority.

#![allow(clippy::unwrap_used, reason = "tests: a fault of the set-up ends the test")]

mod common;

use common::OneShard;
use common::server::answer;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use shardcron_domain::job::HandlerSpec;
use shardcron_domain::shard::FailureClass;
use shardcron_handlers::{HandlerOptions, Handlers};
use shardcron_sdk::testing::TestContext;
use shardcron_sdk::{Registry, ShardError, ShardOutput, ShardSlice};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

const RANGE: ShardSlice = ShardSlice::Range { from: 5, to: 9 };

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate for these hosts, in force or not any more.
fn certificate(authority: &Authority, hosts: &[&str], expired: bool) -> (ServerConfig, Arc<AtomicUsize>) {
    let mut params = CertificateParams::new(hosts.iter().map(|h| (*h).to_owned()).collect::<Vec<_>>()).unwrap();
    if expired {
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
    }
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    (config, Arc::default())
}

/// Serves one answer to everybody who accepts the certificate; its address, and how many requests came through.
async fn serve((config, requests): (ServerConfig, Arc<AtomicUsize>)) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (acceptor, count) = (TlsAcceptor::from(Arc::new(config)), requests.clone());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut buffer = [0; 4096];
            if stream.read(&mut buffer).await.unwrap_or(0) > 0 {
                count.fetch_add(1, Ordering::AcqRel);
                let _ = stream.write_all(answer("200 OK", "", r#"{"rows":5}"#).as_bytes()).await;
                let _ = stream.shutdown().await;
            }
        }
    });
    (format!("https://localhost:{port}/settle"), requests)
}

async fn call(url: &str, authorities: Option<PathBuf>) -> Result<ShardOutput, ShardError> {
    let test = TestContext::new(RANGE);
    let owner = test.context().owner;
    let mut options = HandlerOptions::over(Arc::new(OneShard::running(1, owner, None)), Registry::default());
    options.calls.allow = vec!["*".to_owned()];
    options.calls.authorities = authorities;
    let spec = serde_json::from_str(&format!(r#"{{"url":"{url}"}}"#)).unwrap();
    Handlers::new(options).resolve(&HandlerSpec::Http(Box::new(spec)))?.run(test.context()).await
}

fn written(dir: &Path, name: &str, text: &str) -> Option<PathBuf> {
    let file = dir.join(name);
    std::fs::write(&file, text).unwrap();
    Some(file)
}

#[tokio::test]
async fn only_services_that_prove_who_they_are_are_called() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let known = written(dir.path(), "ca.pem", &ours.pem());
    let (good, requests) = serve(certificate(&ours, &["localhost"], false)).await;
    assert_eq!(call(&good, known.clone()).await, Ok(ShardOutput::rows(5)));
    assert_eq!(requests.load(Ordering::Acquire), 1);
    for (what, certificate, words) in [
        ("another host", certificate(&ours, &["elsewhere.example"], false), "for another host"),
        ("expired", certificate(&ours, &["localhost"], true), "has expired"),
        ("unknown", certificate(&theirs, &["localhost"], false), "worker.http_ca"),
    ] {
        let (url, requests) = serve(certificate).await;
        let error = call(&url, known.clone()).await.unwrap_err();
        assert!(error.class == FailureClass::Transient && error.message.contains("is not trusted"), "{what}: {error}");
        assert!(error.message.contains(words) && error.message.contains(&url), "{what}: {error}");
        assert_eq!(requests.load(Ordering::Acquire), 0, "{what}: nothing was sent");
    }
    // The machine's own authorities know neither.
    let error = call(&good, None).await.unwrap_err();
    assert!(error.message.contains("worker.http_ca") || error.message.contains("ca-certificates"), "{error}");
}

#[tokio::test]
async fn a_file_that_holds_no_authorities_is_told_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let missing = Some(dir.path().join("missing.pem"));
    let empty = written(dir.path(), "empty.pem", "# none\n");
    let broken = written(dir.path(), "broken.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    for file in [missing, empty, broken] {
        let name = file.as_ref().unwrap().display().to_string();
        let error = call("https://localhost:1/", file).await.unwrap_err();
        assert!(error.class == FailureClass::Permanent && error.message.contains(&name), "{error}");
    }
}
