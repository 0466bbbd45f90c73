//! Environment of a launch: defaults, `env_file`, the variables of the spec, and the variables that identify the launch.

use std::collections::{BTreeMap, HashMap};

use super::error::LaunchError;
use super::exit_record;
use super::masking::SecretTexts;
use super::user_files::{Rights, UserFileError};
use crate::model::{EnvValue, Spec};

/// Variables that identify launched processes to the agent. A spec cannot set them.
const LAUNCH_VARIABLES: [&str; 4] =
    ["ABIDE_INSTANCE", LAUNCH_ID_VARIABLE, "ABIDE_PID", exit_record::RECORD_VARIABLE];

/// The variable with the launch id of a process.
pub const LAUNCH_ID_VARIABLE: &str = "ABIDE_INCARNATION";

/// The variables of a spec that [`environment`] ignores.
pub fn ignored_variables(spec: &Spec) -> impl Iterator<Item = &String> {
    spec.env.keys().filter(|name| LAUNCH_VARIABLES.contains(&name.as_str()))
}

/// Variables of a process, and their secret values, which messages mask.
pub struct Environment {
    pub variables: Vec<(String, String)>,
    pub secrets: SecretTexts,
}

impl Environment {
    /// Adds the values that programs gave. They are secret.
    pub fn add_secrets(&mut self, values: Vec<(String, String)>) {
        for (name, value) in values.into_iter().filter(|(name, _)| !LAUNCH_VARIABLES.contains(&name.as_str()))
        {
            self.secrets.add(&value);
            self.variables.retain(|(known, _)| *known != name);
            self.variables.push((name, value));
        }
    }
}

/// The environment of a process: defaults, then `env_file`, `env` and the launch variables, each of which overrides the
/// former. Each name occurs once: of two equal names, some programs and the agent read the first, others the last.
pub async fn environment(
    spec: &Spec,
    rights: &Rights,
    launch_variables: &[(&str, String)],
) -> Result<Environment, LaunchError> {
    let account = rights.account();
    let mut files = FileValues::read(spec, rights).await?;
    let secrets = files.secrets(spec);
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("HOME".to_owned(), account.home.display().to_string()),
        ("SHELL".to_owned(), account.shell.display().to_string()),
        ("USER".to_owned(), account.name.clone()),
        ("LOGNAME".to_owned(), account.name.clone()),
    ]);
    for (name, value) in std::mem::take(&mut files.env_file) {
        if !LAUNCH_VARIABLES.contains(&name.as_str()) {
            env.insert(name, value);
        }
    }
    for (name, value) in &spec.env {
        let value = match value {
            EnvValue::Text(text) => text.clone(),
            EnvValue::Secret(secret) => secret.expose().to_owned(),
            EnvValue::Digest(_) => {
                return Err(LaunchError::NoSecret { name: name.clone() });
            }
            EnvValue::File(_) => files.variables.remove(name).unwrap_or_default(),
            // Added at the start: other commands do not have it.
            EnvValue::Exec(_) => continue,
        };
        if name.contains('\0') || value.contains('\0') {
            return Err(LaunchError::NulInEnv { name: name.clone() });
        }
        if !LAUNCH_VARIABLES.contains(&name.as_str()) {
            env.insert(name.clone(), value);
        }
    }
    env.extend(launch_variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    Ok(Environment { variables: env.into_iter().collect(), secrets })
}

/// The values of a spec's environment that are in files.
struct FileValues {
    env_file: Vec<(String, String)>,
    /// By variable of `env`.
    variables: HashMap<String, String>,
}

impl FileValues {
    async fn read(spec: &Spec, rights: &Rights) -> Result<FileValues, UserFileError> {
        let env_file = match &spec.env_file {
            Some(path) => rights.env_file(path).await?,
            None => Vec::new(),
        };
        let file = |(name, value): (&String, &EnvValue)| match value {
            EnvValue::File(path) => Some((name.clone(), path.clone())),
            EnvValue::Text(_) | EnvValue::Exec(_) | EnvValue::Secret(_) | EnvValue::Digest(_) => None,
        };
        let files: Vec<(String, String)> = spec.env.iter().filter_map(file).collect();
        let variables = match files.is_empty() {
            true => HashMap::new(),
            false => rights.env_values(files).await?.into_iter().collect(),
        };
        Ok(FileValues { env_file, variables })
    }

    /// The secret values of the environment. Every value of a file counts: a file exists to keep values out of manifests.
    fn secrets(&self, spec: &Spec) -> SecretTexts {
        let mut secrets = SecretTexts::default();
        self.env_file.iter().for_each(|(_, value)| secrets.add(value));
        self.variables.values().for_each(|value| secrets.add(value));
        for value in spec.env.values() {
            if let EnvValue::Secret(secret) = value {
                secrets.add(secret.expose());
            }
        }
        secrets
    }
}

/// The secret values of a spec's environment, as its next launch would get them.
pub async fn secret_texts(spec: &Spec, rights: &Rights) -> Result<SecretTexts, UserFileError> {
    Ok(FileValues::read(spec, rights).await?.secrets(spec))
}
