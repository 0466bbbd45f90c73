//! Signatures of saved plans, one or more per plan: made and verified by `ssh-keygen -Y`.
//!
//! A signature covers the whole plan except its signatures: its steps, fingerprint, target, owner, inputs and expiry. The
//! allowed signers are a file that the policy of the control host names. A person is a principal of that file, and counts
//! once.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::ids::fresh_id;

/// The namespace of the signatures: one of another purpose does not count.
const NAMESPACE: &str = "abide-plan";
/// Maximum signatures that are verified.
const MAX_SIGNATURES: usize = 32;
const PROGRAM: &str = "ssh-keygen";

/// Reason why a signature cannot be made or verified.
#[derive(Debug, thiserror::Error)]
pub enum PlanSignatureError {
    #[error("ssh-keygen is not installed")]
    NoProgram,
    #[error("cannot run ssh-keygen: {0}")]
    Program(std::io::Error),
    #[error("cannot write a temporary file: {0}")]
    Temporary(std::io::Error),
    #[error("ssh-keygen: {0}")]
    Refused(String),
    #[error("ssh-keygen made no signature")]
    NoSignature,
}

/// The bytes that are signed: the plan without its signatures, with sorted fields.
fn signed_bytes(plan: &Value) -> Vec<u8> {
    let mut plan = sorted(plan);
    if let Some(fields) = plan.as_object_mut() {
        fields.shift_remove("signatures");
    }
    format!("{NAMESPACE} v1\n{plan}\n").into_bytes()
}

/// Digest of the bytes that are signed.
pub fn digest(plan: &Value) -> String {
    blake3::hash(&signed_bytes(plan)).to_hex().to_string()
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut names: Vec<&String> = fields.keys().collect();
            names.sort_unstable();
            Value::Object(names.into_iter().map(|name| (name.clone(), sorted(&fields[name]))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

/// The signatures in a plan, as text.
pub fn signatures(plan: &Value) -> Vec<&str> {
    plan["signatures"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Signs a plan with a private key, or with a public key whose private key an agent holds.
pub fn sign(plan: &Value, key: &Path) -> Result<String, PlanSignatureError> {
    let mut command = Command::new(PROGRAM);
    command.args(["-Y", "sign", "-n", NAMESPACE, "-f"]).arg(key);
    let output = run(command, &signed_bytes(plan))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.success() {
        true if public_key(&text).is_some() => Ok(text),
        true => Err(PlanSignatureError::NoSignature),
        false => Err(PlanSignatureError::Refused(first_line(&output.stderr))),
    }
}

/// Verified signatures of a plan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct VerifiedSigners {
    /// The principals whose signature is valid.
    pub persons: BTreeSet<String>,
    /// Signatures that do not count, each with the reason.
    pub rejected: Vec<String>,
}

/// Verifies the signatures of a plan against a file of allowed signers.
pub fn verify(plan: &Value, allowed: &Path) -> Result<VerifiedSigners, PlanSignatureError> {
    let (bytes, mut verified) = (signed_bytes(plan), VerifiedSigners::default());
    let folder = TemporaryFolder::create()?;
    for signature in signatures(plan).into_iter().take(MAX_SIGNATURES) {
        let Some(key) = fingerprint(signature) else {
            verified.rejected.push("a signature is not in the format of ssh-keygen".to_owned());
            continue;
        };
        let file = folder.0.join("signature");
        std::fs::write(&file, signature).map_err(PlanSignatureError::Temporary)?;
        match verify_one(&bytes, &file, allowed)? {
            Verdict::Valid(person) => drop(verified.persons.insert(person)),
            Verdict::Rejected(why) => verified.rejected.push(format!("the signature of key {key} {why}")),
        }
    }
    Ok(verified)
}

/// The result of verifying one signature.
enum Verdict {
    /// The signature of this principal.
    Valid(String),
    /// Reason why it does not count.
    Rejected(String),
}

fn verify_one(bytes: &[u8], file: &Path, allowed: &Path) -> Result<Verdict, PlanSignatureError> {
    let mut find = Command::new(PROGRAM);
    find.args(["-Y", "find-principals", "-s"]).arg(file).arg("-f").arg(allowed);
    let found = run(find, &[])?;
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    // Several lines of the file can name one key: its first principal that is valid counts.
    let mut principals = found.lines().map(str::trim).filter(|line| !line.is_empty()).peekable();
    if principals.peek().is_none() {
        return Ok(Verdict::Rejected(format!("has no allowed signer in {}", allowed.display())));
    }
    let mut why = String::new();
    for principal in principals {
        let mut check = Command::new(PROGRAM);
        check.args(["-Y", "verify", "-n", NAMESPACE, "-I", principal, "-s"]).arg(file).arg("-f").arg(allowed);
        let checked = run(check, bytes)?;
        if checked.status.success() {
            return Ok(Verdict::Valid(principal.to_owned()));
        }
        why = match first_line(&checked.stderr) {
            text if text.contains("incorrect signature") => {
                "does not match: the plan was changed after it was signed".to_owned()
            }
            text => format!("is not valid: {text}"),
        };
    }
    Ok(Verdict::Rejected(why))
}

/// The fingerprint of the key of a signature, as `ssh-keygen -l` shows it.
pub fn fingerprint(signature: &str) -> Option<String> {
    Some(format!("SHA256:{}", STANDARD_NO_PAD.encode(Sha256::digest(public_key(signature)?))))
}

/// The public key in a signature: the first field after the magic and the version.
pub fn public_key(signature: &str) -> Option<Vec<u8>> {
    let text = signature.trim().strip_prefix("-----BEGIN SSH SIGNATURE-----")?;
    let text = text.strip_suffix("-----END SSH SIGNATURE-----")?;
    let text: String = text.split_ascii_whitespace().collect();
    let blob = STANDARD.decode(text).ok()?;
    let rest = blob.strip_prefix(b"SSHSIG")?.get(4..)?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    rest.get(..length).map(<[u8]>::to_vec)
}

fn run(mut command: Command, input: &[u8]) -> Result<Output, PlanSignatureError> {
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| match error.kind() {
        ErrorKind::NotFound => PlanSignatureError::NoProgram,
        _ => PlanSignatureError::Program(error),
    })?;
    let mut stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // ssh-keygen may end before it has read everything.
        scope.spawn(move || stdin.take().map(|mut pipe| pipe.write_all(input)));
        child.wait_with_output()
    });
    output.map_err(PlanSignatureError::Program)
}

fn first_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("Signing "));
    lines.take(1).next().unwrap_or("no message").trim_end_matches(['\r', '.']).to_owned()
}

/// A private folder that is removed with its files.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn create() -> Result<TemporaryFolder, PlanSignatureError> {
        let path = std::env::temp_dir().join(format!("abide-plan-{}", fresh_id()));
        DirBuilder::new().mode(0o700).create(&path).map_err(PlanSignatureError::Temporary)?;
        Ok(TemporaryFolder(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_signed_bytes_are_the_plan_without_signatures_in_any_order_of_fields() {
        let one = json!({"owner": "shop", "waves": [[{"op": "start", "id": "1"}]], "signatures": ["x"]});
        let other = json!({"waves": [[{"id": "1", "op": "start"}]], "owner": "shop"});
        assert_eq!(signed_bytes(&one), signed_bytes(&other));
        let text = "abide-plan v1\n{\"owner\":\"shop\",\"waves\":[[{\"id\":\"1\",\"op\":\"start\"}]]}\n";
        assert_eq!(String::from_utf8(signed_bytes(&one)).expect("text"), text);
        let changed = json!({"waves": [[{"id": "1", "op": "stop"}]], "owner": "shop"});
        assert_ne!(signed_bytes(&one), signed_bytes(&changed));
    }

    #[test]
    fn text_that_is_no_signature_has_no_key() {
        for text in ["", "x", "-----BEGIN SSH SIGNATURE-----\n-----END SSH SIGNATURE-----"] {
            assert_eq!(public_key(text), None, "{text:?}");
        }
        let blob = |bytes: &[u8]| {
            let text = STANDARD.encode(bytes);
            format!("-----BEGIN SSH SIGNATURE-----\n{text}\n-----END SSH SIGNATURE-----\n")
        };
        assert_eq!(public_key(&blob(b"SSHSIG\0\0\0\x01\0\0\0\x03keyrest")), Some(b"key".to_vec()));
        assert_eq!(public_key(&blob(b"SSHSIG\0\0\0\x01\xff\xff\xff\xffkey")), None);
        assert_eq!(public_key(&blob(b"SSHSIG\0\0")), None);
    }
}
