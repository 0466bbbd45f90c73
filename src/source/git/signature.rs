//! Commit signatures: verified against a key file only, never against the user's own keys.
//!
//! The file is an ssh allowed-signers file, or OpenPGP public keys (exported, armoured or not, or a keyring); its
//! content decides the kind. A signature of the other kind is not valid.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::command::{CommandError, GitCommand};
use crate::proc::ProcStat;

/// Maximum size of a key file.
const MAX_KEY_FILE_BYTES: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Lines of an allowed-signers file.
    Ssh,
    /// Exported keys.
    Pgp,
    /// A keyring in gpg's own format.
    Keybox,
}

/// Reason why a key file cannot be used, or why a signature is not valid.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    #[error("{}: no such file", .0.display())]
    NoFile(PathBuf),
    #[error("cannot read {}: {source}", file.display())]
    Unreadable { file: PathBuf, source: io::Error },
    #[error("{} is larger than {MAX_KEY_FILE_BYTES} bytes", .0.display())]
    TooLarge(PathBuf),
    #[error("{} contains neither allowed signers of ssh nor public keys of gpg", .0.display())]
    NoKeys(PathBuf),
    #[error("cannot create a folder for keys: {0}")]
    Folder(#[source] io::Error),
    #[error("cannot copy the keys: {0}")]
    Copy(#[source] io::Error),
    #[error("the keys cannot be read: {stderr}")]
    Import { stderr: String },
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("not signed")]
    NotSigned,
    #[error("signed with ssh, but {} contains keys of gpg", .0.display())]
    SignedWithSsh(PathBuf),
    #[error("signed with gpg, but {} contains keys of ssh", .0.display())]
    SignedWithGpg(PathBuf),
    #[error("signature of an unknown kind")]
    UnknownKind,
    #[error("invalid signature, checked with {}: {why}", file.display())]
    NotGood { file: PathBuf, why: String },
}

/// Reads a key file and detects its kind.
pub fn keys(file: &Path) -> Result<(Keys, Vec<u8>), SignatureError> {
    let mut bytes = Vec::new();
    let read =
        fs::File::open(file).and_then(|open| open.take(MAX_KEY_FILE_BYTES + 1).read_to_end(&mut bytes));
    let name = || file.to_path_buf();
    read.map_err(|source| match source.kind() {
        ErrorKind::NotFound => SignatureError::NoFile(name()),
        _ => SignatureError::Unreadable { file: name(), source },
    })?;
    if bytes.len() as u64 > MAX_KEY_FILE_BYTES {
        return Err(SignatureError::TooLarge(name()));
    }
    let kind = kind(&bytes).ok_or_else(|| SignatureError::NoKeys(name()))?;
    Ok((kind, bytes))
}

fn kind(bytes: &[u8]) -> Option<Keys> {
    if bytes.get(8..12) == Some(b"KBXf") {
        return Some(Keys::Keybox);
    }
    // Every OpenPGP packet starts with this bit, and no text does.
    if bytes.first().is_some_and(|first| first & 0x80 != 0) {
        return Some(Keys::Pgp);
    }
    let text = std::str::from_utf8(bytes).ok()?;
    if text.contains("-----BEGIN PGP PUBLIC KEY BLOCK-----") {
        return Some(Keys::Pgp);
    }
    let is_key =
        |word: &str| ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"].iter().any(|kind| word.starts_with(kind));
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    // A principal, perhaps options, then the key: a bare public key has no principal.
    lines.any(|line| line.split_ascii_whitespace().skip(1).any(is_key)).then_some(Keys::Ssh)
}

/// Whether a commit has a valid signature.
pub fn verify(program: &GitCommand, commit: &str, file: &Path) -> Result<(), SignatureError> {
    verify_all(program, &[commit], file).map_err(|(_, error)| error)
}

/// `Err`: the first commit without a valid signature, and why.
pub fn verify_all(
    program: &GitCommand,
    commits: &[&str],
    file: &Path,
) -> Result<(), (String, SignatureError)> {
    let Some(first) = commits.first() else { return Ok(()) };
    let verifier = Verifier::new(program, file).map_err(|why| ((*first).to_owned(), why))?;
    commits.iter().try_for_each(|commit| verifier.verify(commit).map_err(|why| ((*commit).to_owned(), why)))
}

/// The keys of a file, prepared for git and gpg.
struct Verifier<'a> {
    program: &'a GitCommand,
    file: &'a Path,
    keys: Keys,
    home: GpgHome,
    /// Settings of git.
    settings: Vec<String>,
}

impl<'a> Verifier<'a> {
    fn new(program: &'a GitCommand, file: &'a Path) -> Result<Verifier<'a>, SignatureError> {
        let (keys, bytes) = keys(file)?;
        let home = GpgHome::make(program)?;
        match keys {
            Keys::Ssh => {}
            Keys::Pgp => import(program, &home.0, &bytes)?,
            Keys::Keybox => fs::write(home.0.join("pubring.kbx"), &bytes).map_err(SignatureError::Copy)?,
        }
        let signers = home.0.join("signers");
        let text: &[u8] = if keys == Keys::Ssh { &bytes } else { &[] };
        fs::write(&signers, text).map_err(SignatureError::Copy)?;
        // git chooses the program by the kind of signature: other kinds get `false`. With ssh, a signature without a
        // listed signer does not count; gpg knows only the keys of the file.
        let (ssh, pgp, trust) = match keys {
            Keys::Ssh => ("ssh-keygen", "false", "fully"),
            Keys::Pgp | Keys::Keybox => ("false", "gpg", "undefined"),
        };
        let settings = vec![
            format!("gpg.ssh.program={ssh}"),
            format!("gpg.openpgp.program={pgp}"),
            format!("gpg.program={pgp}"),
            "gpg.x509.program=false".to_owned(),
            format!("gpg.ssh.allowedSignersFile={}", signers.display()),
            format!("gpg.minTrustLevel={trust}"),
        ];
        Ok(Verifier { program, file, keys, home, settings })
    }

    fn verify(&self, commit: &str) -> Result<(), SignatureError> {
        let file = || self.file.to_path_buf();
        let ended = self.program.local(&["cat-file", "commit", commit], &[], 1 << 24)?;
        let signed = ended.is_well().then(|| scheme(&ended.out)).flatten();
        match (signed, self.keys) {
            (None, _) => return Err(SignatureError::NotSigned),
            (Some(Scheme::Ssh), Keys::Ssh) | (Some(Scheme::Pgp), Keys::Pgp | Keys::Keybox) => {}
            (Some(Scheme::Ssh), _) => return Err(SignatureError::SignedWithSsh(file())),
            (Some(Scheme::Pgp), _) => return Err(SignatureError::SignedWithGpg(file())),
            (Some(Scheme::Other), _) => return Err(SignatureError::UnknownKind),
        }
        let mut args: Vec<&str> = self.settings.iter().flat_map(|setting| ["-c", setting.as_str()]).collect();
        args.extend(["verify-commit", "--raw", commit]);
        let ended = self.program.local_with(&args, &[], 1 << 20, &[("GNUPGHOME", &self.home.0)])?;
        match ended.is_well() {
            true => Ok(()),
            false => Err(SignatureError::NotGood { file: file(), why: reason(&ended.stderr, self.file) }),
        }
    }
}

/// The kind of a commit's signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    Ssh,
    Pgp,
    Other,
}

fn scheme(commit: &[u8]) -> Option<Scheme> {
    let head = commit.split(|byte| *byte == b'\n').take_while(|line| !line.is_empty());
    let signature = head
        .filter_map(|line| line.strip_prefix(b"gpgsig ").or_else(|| line.strip_prefix(b"gpgsig-sha256 ")));
    signature.last().map(|begin| match begin {
        b"-----BEGIN SSH SIGNATURE-----" => Scheme::Ssh,
        b"-----BEGIN PGP SIGNATURE-----" | b"-----BEGIN PGP MESSAGE-----" => Scheme::Pgp,
        _ => Scheme::Other,
    })
}

/// gpg's status lines are replaced by a readable reason.
fn reason(said: &str, file: &Path) -> String {
    let parts: Vec<&str> = said.split("; ").filter(|part| !part.starts_with("[GNUPG:]")).collect();
    match parts.is_empty() {
        true => format!(
            "no key in {} made this signature, or the key or the signature is expired or revoked",
            file.display()
        ),
        false => parts.join("; "),
    }
}

/// A private home directory for gpg, removed afterwards.
struct GpgHome(PathBuf);

impl GpgHome {
    fn make(program: &GitCommand) -> Result<GpgHome, SignatureError> {
        let home = GpgHome(program.mirror.with_extension(format!("keys-{}", std::process::id())));
        remove_abandoned(&program.mirror);
        let _ = fs::remove_dir_all(&home.0);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&home.0);
        // No prompts, no fetches, no background processes; every key in the file is trusted.
        let conf =
            "batch\nno-tty\nno-autostart\nno-auto-key-retrieve\nno-auto-check-trustdb\ntrust-model always\n";
        made.and_then(|()| fs::write(home.0.join("gpg.conf"), conf)).map_err(SignatureError::Folder)?;
        Ok(home)
    }
}

/// Removes the home directories of processes that were killed.
fn remove_abandoned(mirror: &Path) {
    let (Some(folder), Some(name)) =
        (mirror.parent(), mirror.with_extension("keys-").file_name().map(OsStr::to_owned))
    else {
        return;
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let pid = entry
            .file_name()
            .to_str()
            .zip(name.to_str())
            .and_then(|(entry, name)| entry.strip_prefix(name)?.parse().ok());
        if pid.is_some_and(|pid| !ProcStat::of(pid).is_some_and(|stat| stat.is_alive())) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for GpgHome {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn import(program: &GitCommand, home: &Path, bytes: &[u8]) -> Result<(), SignatureError> {
    let file = home.join("import");
    fs::write(&file, bytes).map_err(SignatureError::Copy)?;
    let mut command = Command::new("gpg");
    command.args(["--quiet", "--import"]).arg(&file).env("GNUPGHOME", home).stdin(Stdio::null());
    let ended = program.run_other(command)?;
    match ended.is_well() {
        true => Ok(()),
        false => Err(SignatureError::Import { stderr: ended.stderr }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_of_a_key_file_decides_its_kind() {
        for (text, kind) in [
            ("# who may\nann@example.org ssh-ed25519 AAAA", Some(Keys::Ssh)),
            ("ann namespaces=\"git\" ecdsa-sha2-nistp256 AAAA", Some(Keys::Ssh)),
            ("ssh-ed25519 AAAA ann", None),
            ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n", Some(Keys::Pgp)),
            ("", None),
            ("hello", None),
        ] {
            assert_eq!(super::kind(text.as_bytes()), kind, "{text}");
        }
        assert_eq!(super::kind(&[0x99, 0x01, 0x0d]), Some(Keys::Pgp));
        assert_eq!(super::kind(b"\0\0\0\x20\x01\x01\0\x02KBXf"), Some(Keys::Keybox));
    }

    #[test]
    fn homes_of_ended_processes_are_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = std::process::id();
        let names = [
            format!("m.keys-{own}"),
            format!("m.keys-{}", u32::MAX),
            "m.keys-x".to_owned(),
            "m.git".to_owned(),
        ];
        names.iter().for_each(|name| fs::create_dir(folder.path().join(name)).expect("a folder"));
        remove_abandoned(&folder.path().join("m.git"));
        let left: Vec<bool> = names.iter().map(|name| folder.path().join(name).exists()).collect();
        assert_eq!(left, [true, false, true, true]);
    }

    #[test]
    fn a_signature_in_the_message_is_none() {
        let text = b"tree x\n\ngpgsig -----BEGIN SSH SIGNATURE-----\n";
        assert_eq!(scheme(text), None);
        assert_eq!(scheme(b"tree x\ngpgsig -----BEGIN SSH SIGNATURE-----\n x\n\nhi"), Some(Scheme::Ssh));
    }
}
