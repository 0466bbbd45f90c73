//! Environment of a launch: defaults, `env_file`, the variables of the spec, and the variables that identify the launch.

use std::collections::{BTreeMap, HashMap};

use super::error::LaunchError;
use super::exit_record;
use super::masking::SecretTexts;
use super::user_files::Rights;
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

/// The environment of a process: defaults, then `env_file`, `env` and the launch variables, each of which overrides the
/// former. Each name occurs once: of
/// two equal names, some programs and the agent read the first, others the last.
pub async fn environment(
    spec: &Spec,
    rights: &Rights,
    launch_variables: &[(&str, String)],
) -> Result<Environment, LaunchError> {
    let account = rights.account();
    let mut secrets = SecretTexts::default();
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("HOME".to_owned(), account.home.display().to_string()),
        ("SHELL".to_owned(), account.shell.display().to_string()),
        ("USER".to_owned(), account.name.clone()),
        ("LOGNAME".to_owned(), account.name.clone()),
    ]);
    if let Some(path) = &spec.env_file {
        // Every value counts as a secret: the file exists to keep values out of manifests.
        for (name, value) in rights.env_file(path).await? {
            secrets.add(&value);
            if !LAUNCH_VARIABLES.contains(&name.as_str()) {
                env.insert(name, value);
            }
        }
    }
    let file = |(name, value): (&String, &EnvValue)| match value {
        EnvValue::File(path) => Some((name.clone(), path.clone())),
        EnvValue::Text(_) | EnvValue::Secret(_) | EnvValue::Digest(_) => None,
    };
    let files: Vec<(String, String)> = spec.env.iter().filter_map(file).collect();
    let mut values: HashMap<String, String> = match files.is_empty() {
        true => HashMap::new(),
        false => rights.env_values(files).await?.into_iter().collect(),
    };
    for (name, value) in &spec.env {
        let is_secret = matches!(value, EnvValue::Secret(_) | EnvValue::File(_));
        let value = match value {
            EnvValue::Text(text) => text.clone(),
            EnvValue::Secret(secret) => secret.expose().to_owned(),
            EnvValue::Digest(_) => {
                return Err(LaunchError::NoSecret { name: name.clone() });
            }
            EnvValue::File(_) => values.remove(name).unwrap_or_default(),
        };
        if name.contains('\0') || value.contains('\0') {
            return Err(LaunchError::NulInEnv { name: name.clone() });
        }
        if is_secret {
            secrets.add(&value);
        }
        if !LAUNCH_VARIABLES.contains(&name.as_str()) {
            env.insert(name.clone(), value);
        }
    }
    env.extend(launch_variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    Ok(Environment { variables: env.into_iter().collect(), secrets })
}
