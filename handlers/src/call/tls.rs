//! Whom https trusts, and why it does not.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{CertificateError, ClientConfig, RootCertStore};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

/// The machine's authorities, and those of a file beside them. No variable of the environment switches anything off.
pub(super) fn config(authorities: Option<&Path>) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    let (of_the_machine, _) = roots.add_parsable_certificates(found.certs);
    if of_the_machine == 0 && authorities.is_none() {
        let why = found.errors.first().map_or("there are none".to_owned(), ToString::to_string);
        return Err(format!(
            "the certificates of this worker's machine can't be read ({why}); install them (the package ca-certificates)"
        ));
    }
    if let Some(file) = authorities {
        add(&mut roots, file)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(versions.map_err(|e| e.to_string())?.with_root_certificates(roots).with_no_client_auth())
}

fn add(roots: &mut RootCertStore, file: &Path) -> Result<(), String> {
    let unusable = |why: String| {
        format!(
            "http_ca = \"{}\" in this worker's configuration is no file of certificates (PEM): {why}",
            file.display()
        )
    };
    let certificates = CertificateDer::pem_file_iter(file).map_err(|e| unusable(e.to_string()))?;
    let mut added = 0;
    for certificate in certificates {
        let certificate = certificate.map_err(|e| unusable(e.to_string()))?;
        roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
        added += 1;
    }
    if added == 0 { Err(unusable("there is none in it".into())) } else { Ok(()) }
}

/// Why a service is not trusted, in words that say what to do; `None`: the error is of another kind.
pub(super) fn refusal(error: &(dyn Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(explained(found));
        }
        // An error of I/O leads to what is behind its inner error, and not to the inner one itself.
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = inner.map(|inner| inner as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}

fn explained(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(why) = error else { return error.to_string() };
    let what = match why {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired; whoever runs it has to renew it (or this machine's clock is wrong)"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet; is this machine's clock right?"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "its certificate is for another host; look at the host in the job's url"
        }
        CertificateError::UnknownIssuer => {
            "its certificate is of an authority that this worker does not know; for a private one, name the file of its certificate in \
             the worker's configuration (worker.http_ca)"
        }
        CertificateError::Revoked => "its certificate has been revoked",
        _ => "its certificate is refused",
    };
    format!("{what} ({why})")
}
