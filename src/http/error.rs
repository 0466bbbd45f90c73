//! Why a call failed, in one line; and whether it may have been carried out.

use std::error::Error;

use rustls::AlertDescription;

/// An error and what caused it, in one line.
pub fn describe(error: &reqwest::Error) -> String {
    if let Some(alert) = certificate_alert(error) {
        return describe_certificate_alert(alert);
    }
    let mut text = String::new();
    for error in causes(error) {
        let said = error.to_string();
        // Each layer tends to repeat the next one.
        if !text.ends_with(&said) {
            text.push_str(if text.is_empty() { "" } else { ": " });
            text.push_str(&said);
        }
    }
    text
}

/// What an error is at its root, for those whose outer layers say nothing.
pub fn root_cause(error: &reqwest::Error) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

/// Nobody has read the request: it did nothing.
pub fn was_not_sent(error: &reqwest::Error) -> bool {
    error.is_connect() || error.is_builder() || certificate_alert(error).is_some() || was_canceled(error)
}

/// The connection ended before anything was sent on it, and so soon that the reason is not known.
pub fn was_canceled(error: &reqwest::Error) -> bool {
    causes(error).any(|error| error.downcast_ref().is_some_and(hyper::Error::is_canceled))
}

/// The peer's word, if it closed the door on account of our certificate. In TLS 1.3 that word comes when a request has
/// already been sent; nobody has read it: what is encrypted is opened only for who was let in.
fn certificate_alert(error: &reqwest::Error) -> Option<AlertDescription> {
    let alert = |error: &(dyn Error + 'static)| {
        // An I/O error does not name what it carries as its source; it may carry another.
        let mut inner: &(dyn Error + 'static) = error;
        while let Some(carried) = inner.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            inner = carried;
        }
        match inner.downcast_ref() {
            Some(rustls::Error::AlertReceived(alert)) => Some(*alert),
            _ => None,
        }
    };
    causes(error).find_map(alert).filter(|alert| is_certificate_alert(*alert))
}

fn is_certificate_alert(alert: AlertDescription) -> bool {
    use AlertDescription as Alert;
    matches!(
        alert,
        Alert::CertificateRequired
            | Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::AccessDenied
            | Alert::DecryptError
    )
}

fn describe_certificate_alert(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateRequired => "it wants a client certificate, and was shown none",
        // Some servers say this of none, too.
        AlertDescription::BadCertificate => {
            "it wants a client certificate, and does not take ours, or that there is none"
        }
        _ => "it does not take our client certificate",
    };
    format!("{why} (TLS alert {alert:?})")
}

fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Some(error as &(dyn Error + 'static)), |error| (*error).source())
}
