//! Precheck of the local system: configuration files that are not delivered yet.

use crate::model::{Op, Reason, Step};

/// Refuses a reload or restart for a configuration file that is not delivered yet: the process would read the old one.
pub fn check_config_files(step: &Step) -> Option<String> {
    let for_a_file = |why: &Reason| why.field.as_deref().is_some_and(|field| field.starts_with("configmap"));
    let matters = matches!(step.op, Op::Reload | Op::Restart) && step.why.iter().any(for_a_file);
    let spec = step.spec.as_ref().filter(|_| matters)?;
    crate::agent::first_mismatch(&spec.configmap).map(|what| format!("ConfigNotThere: {what}"))
}
