//! Certificate authority of a fleet: its key and certificate files, and the certificates that it signs.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::certificate::{AgentCertificate, CertificateError, MAX_HOSTS, uri_of_host};
use super::{CLOCK_SKEW_SECS, write_private};
use crate::ids::fresh_id;
use crate::model::{HostKey, Time};
use crate::permissions::{PermissionError, check_private, own_uid, refuse_changeable};

/// Maximum bytes of a signing request in PEM: one with an RSA key of 8192 bits has about 2800.
pub const MAX_REQUEST_BYTES: usize = 8 << 10;
/// Validity of a new CA certificate.
const CA_LIFE_SECS: u64 = 10 * 365 * 86_400;

/// Reason why the files of an authority cannot be used. The texts contain no key.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("cannot read {}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("cannot write {}", file.display())]
    Write { file: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Unsafe(#[from] PermissionError),
    #[error("{readable}: a reader can sign certificates for every host")]
    Readable { readable: String },
    #[error("{} contains no private key in PEM of a supported kind", file.display())]
    Key { file: PathBuf },
    #[error("{} contains no CA certificate in PEM", file.display())]
    Certificate { file: PathBuf },
    #[error("the CA certificate {} and the key {} do not match", cert.display(), key.display())]
    Mismatch { cert: PathBuf, key: PathBuf },
    #[error("{} exists and {} does not: restore it, or remove both", present.display(), missing.display())]
    Incomplete { present: PathBuf, missing: PathBuf },
    #[error("cannot make the CA")]
    Make(#[source] rcgen::Error),
}

/// Reason why no certificate is signed.
#[derive(Debug, thiserror::Error)]
pub enum SigningError {
    #[error("the certificate request is larger than {MAX_REQUEST_BYTES} bytes")]
    TooLarge,
    #[error("the certificate request is not valid")]
    Invalid(#[source] rcgen::Error),
    #[error("the key of the certificate request must be ECDSA on P-256 or Ed25519")]
    KeyKind,
    #[error("a certificate has 1 to {MAX_HOSTS} hosts")]
    Hosts,
    #[error("the agent's id or a host cannot be a name of a certificate")]
    Name(#[source] rcgen::Error),
    #[error("cannot sign the certificate")]
    Sign(#[source] rcgen::Error),
    #[error(transparent)]
    Unreadable(#[from] CertificateError),
}

/// Paths of the CA certificate and of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Content of a certificate that the gateway decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateSubject {
    pub agent: String,
    pub hosts: Vec<HostKey>,
    pub life: Duration,
}

/// A signed certificate: its facts and its PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedPem {
    pub facts: AgentCertificate,
    pub pem: String,
}

/// A CA that signs client certificates of agents.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
}

impl AuthorityFiles {
    /// The files of a CA folder.
    pub fn in_folder(folder: &Path) -> AuthorityFiles {
        AuthorityFiles { cert: folder.join("ca.pem"), key: folder.join("ca.key") }
    }

    /// Whether both files exist. One without the other is an error: a new CA would lock out every agent.
    pub fn exist(&self) -> Result<bool, AuthorityError> {
        match (self.cert.exists(), self.key.exists()) {
            (true, true) => Ok(true),
            (false, false) => Ok(false),
            (true, false) => {
                Err(AuthorityError::Incomplete { present: self.cert.clone(), missing: self.key.clone() })
            }
            (false, true) => {
                Err(AuthorityError::Incomplete { present: self.key.clone(), missing: self.cert.clone() })
            }
        }
    }

    /// Makes a CA. The certificate is written last: it never exists without its key.
    pub fn create(&self, now: Time) -> Result<(), AuthorityError> {
        if let Some(folder) =
            self.key.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        {
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
            made.map_err(|source| AuthorityError::Write { file: folder.to_owned(), source })?;
        }
        let key = KeyPair::generate().map_err(AuthorityError::Make)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, format!("Abide fleet CA {}", &fresh_id()[..8]));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(fresh_serial());
        set_validity(&mut params, now, CA_LIFE_SECS);
        let cert = params.self_signed(&key).map_err(AuthorityError::Make)?;
        let write = |file: &PathBuf, text: &str| {
            write_private(file, text).map_err(|source| AuthorityError::Write { file: file.clone(), source })
        };
        write(&self.key, &key.serialize_pem())?;
        write(&self.cert, &cert.pem())
    }

    /// Reads the CA. A key that another user can read or change, or a certificate that another user can change, is
    /// refused.
    pub fn read(&self) -> Result<Authority, AuthorityError> {
        refuse_changeable(&self.cert, own_uid())?;
        if let Some(readable) = check_private(&self.key)? {
            return Err(AuthorityError::Readable { readable });
        }
        let read = |file: &PathBuf| {
            std::fs::read_to_string(file)
                .map_err(|source| AuthorityError::Read { file: file.clone(), source })
        };
        let key = KeyPair::from_pem(&read(&self.key)?)
            .map_err(|_| AuthorityError::Key { file: self.key.clone() })?;
        let no_certificate = || AuthorityError::Certificate { file: self.cert.clone() };
        // The first certificate signs; further ones are trusted only.
        let cert =
            CertificateDer::from_pem_slice(read(&self.cert)?.as_bytes()).map_err(|_| no_certificate())?;
        let facts = AgentCertificate::parse(&cert).map_err(|_| no_certificate())?;
        if facts.public_key != key.subject_public_key_info() {
            return Err(AuthorityError::Mismatch { cert: self.cert.clone(), key: self.key.clone() });
        }
        let issuer = Issuer::from_ca_cert_der(&cert, key).map_err(|_| no_certificate())?;
        Ok(Authority { issuer })
    }
}

impl Authority {
    /// Signs a certificate for the key of a request. Nothing else of the request counts.
    pub fn sign_request(
        &self,
        request: &str,
        subject: &CertificateSubject,
        now: Time,
    ) -> Result<IssuedPem, SigningError> {
        if request.len() > MAX_REQUEST_BYTES {
            return Err(SigningError::TooLarge);
        }
        let request = CertificateSigningRequestParams::from_pem(request).map_err(SigningError::Invalid)?;
        let kinds = [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ED25519];
        if !kinds.contains(&request.public_key.algorithm()) {
            return Err(SigningError::KeyKind);
        }
        self.sign(&request.public_key, subject, now)
    }

    /// Signs a new certificate for the key of an earlier one.
    pub fn renew(
        &self,
        former: &AgentCertificate,
        subject: &CertificateSubject,
        now: Time,
    ) -> Result<IssuedPem, SigningError> {
        let key = SubjectPublicKeyInfo::from_der(&former.public_key).map_err(SigningError::Invalid)?;
        self.sign(&key, subject, now)
    }

    fn sign(
        &self,
        key: &impl PublicKeyData,
        subject: &CertificateSubject,
        now: Time,
    ) -> Result<IssuedPem, SigningError> {
        if subject.hosts.is_empty() || subject.hosts.len() > MAX_HOSTS {
            return Err(SigningError::Hosts);
        }
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, subject.agent.as_str());
        for host in &subject.hosts {
            let name = uri_of_host(host).try_into().map_err(SigningError::Name)?;
            params.subject_alt_names.push(SanType::URI(name));
        }
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(fresh_serial());
        set_validity(&mut params, now, subject.life.as_secs());
        let signed = params.signed_by(key, &self.issuer).map_err(SigningError::Sign)?;
        Ok(IssuedPem { facts: AgentCertificate::parse(signed.der())?, pem: signed.pem() })
    }
}

/// A positive serial number of 126 random bits.
fn fresh_serial() -> SerialNumber {
    let mut bytes = hex::decode(fresh_id()).unwrap_or_default();
    if let Some(first) = bytes.first_mut() {
        // A set top bit would add a sign byte, and a zero byte would be dropped.
        *first = (*first & 0x3f) | 0x40;
    }
    SerialNumber::from(bytes)
}

/// Valid from [`CLOCK_SKEW_SECS`] before `now` until `life_secs` after it.
fn set_validity(params: &mut CertificateParams, now: Time, life_secs: u64) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let now = Duration::from_secs(u64::try_from(now.0 / 1000).unwrap_or(0));
    params.not_before = epoch + now.saturating_sub(Duration::from_secs(CLOCK_SKEW_SECS));
    params.not_after = epoch + now + Duration::from_secs(life_secs);
}

#[cfg(test)]
mod tests {
    use super::super::AgentKey;
    use super::*;

    fn subject(hosts: &[&str]) -> CertificateSubject {
        let hosts = hosts.iter().map(|host| host.parse().expect("a host")).collect();
        CertificateSubject { agent: "one".to_owned(), hosts, life: Duration::from_secs(3600) }
    }

    #[test]
    fn a_certificate_names_the_hosts_that_the_gateway_chose() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = AuthorityFiles::in_folder(&folder.path().join("ca"));
        let now = Time(1_763_424_000_000);
        assert!(!files.exist().expect("none"));
        files.create(now).expect("a CA");
        let authority = files.read().expect("a CA");
        let request = AgentKey::generate().expect("a key").request("another").expect("a request");
        let hosts = ["0:10.0.0.7", "0:fe80::7", "@id:7"];
        let issued = authority.sign_request(&request, &subject(&hosts), now).expect("a certificate");
        let facts = &issued.facts;
        assert_eq!(facts.hosts.iter().map(ToString::to_string).collect::<Vec<_>>(), hosts);
        assert_eq!((facts.agent.as_str(), facts.serial.len()), ("one", 32));
        assert_eq!(facts.not_before, now.before_secs(CLOCK_SKEW_SECS));
        assert_eq!(facts.not_after, now.after_secs(3600));
        let renewed = authority.renew(facts, &subject(&hosts), now.after_secs(60)).expect("a certificate");
        assert_eq!(renewed.facts.key, facts.key);
        assert_ne!(renewed.facts.serial, facts.serial);
        for wrong in ["", "x", &request[..request.len() / 2]] {
            assert!(matches!(
                authority.sign_request(wrong, &subject(&hosts), now),
                Err(SigningError::Invalid(_))
            ));
        }
        let huge = format!("{}{request}", "x".repeat(MAX_REQUEST_BYTES));
        assert!(matches!(authority.sign_request(&huge, &subject(&hosts), now), Err(SigningError::TooLarge)));
        assert!(matches!(authority.sign_request(&request, &subject(&[]), now), Err(SigningError::Hosts)));
    }

    #[test]
    fn a_key_that_others_can_read_or_that_does_not_match_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let files = AuthorityFiles::in_folder(folder.path());
        files.create(Time(1_763_424_000_000)).expect("a CA");
        let mode = |mode: u32| {
            std::fs::set_permissions(&files.key, std::fs::Permissions::from_mode(mode)).expect("a mode");
        };
        let refused = || files.read().err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(std::fs::metadata(&files.key).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(refused(), "");
        mode(0o644);
        assert!(refused().contains("readable by every user"), "{}", refused());
        mode(0o666);
        assert!(refused().contains("writable by every user"), "{}", refused());
        mode(0o600);
        write_private(&files.key, &AgentKey::generate().expect("a key").reveal()).expect("a file");
        assert!(refused().contains("do not match"), "{}", refused());
        std::fs::remove_file(&files.key).expect("a file");
        assert!(files.exist().is_err());
    }
}
