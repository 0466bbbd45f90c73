//! Keys of result maps. An address or agent id may contain `:`, so a key is built and looked up, never split.

use crate::model::{Host, HostKey, ProcessKey, Spec};

/// `cloud:supplier:ip:namespace:name`, of calls with a supplier. `None`: a host without an address.
pub fn v1(host: &Host, process: &ProcessKey) -> Option<String> {
    let HostKey::Address { cloud, ip } = &host.key else { return None };
    let supplier = host.supplier.unwrap_or(0);
    Some(format!("{cloud}:{supplier}:{ip}:{}:{}", process.namespace, process.name))
}

/// The key of a whole namespace.
pub fn v1_namespace(host: &Host, namespace: &str) -> Option<String> {
    let HostKey::Address { cloud, ip } = &host.key else { return None };
    Some(format!("{cloud}:{}:{ip}:{namespace}", host.supplier.unwrap_or(0)))
}

/// `cloud:ip:namespace:name`, or `agent_id:namespace:name` for a request by agent id.
pub fn v2(host: &HostKey, process: &ProcessKey) -> String {
    match host {
        HostKey::Address { cloud, ip } => format!("{cloud}:{ip}:{}:{}", process.namespace, process.name),
        HostKey::Agent(id) => format!("{id}:{}:{}", process.namespace, process.name),
    }
}

/// Uses the caller's spelling of an address, with which the caller looks the key up.
pub fn as_written(key: String, host: &HostKey, written: Option<&String>) -> String {
    match (host, written) {
        (HostKey::Address { ip, .. }, Some(written)) => key.replacen(&ip.to_string(), written, 1),
        _ => key,
    }
}

/// `setup_path/proc_name:cloud:ip`: JOB identifies a process by its path.
pub fn job(host: &HostKey, spec: &Spec) -> String {
    let program = format!("{}/{}", spec.identity.setup_path.trim_end_matches('/'), spec.identity.proc_name);
    match host {
        HostKey::Address { cloud, ip } => format!("{program}:{cloud}:{ip}"),
        HostKey::Agent(id) => format!("{program}:{id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_as_the_documents_show_them() {
        let address = |text: &str| text.parse::<HostKey>().expect("a host");
        let process: ProcessKey = "gse/proc-test".parse().expect("a name");
        let host = Host { key: address("1:10.0.0.1"), supplier: Some(2), agent_id: None };
        assert_eq!(v1(&host, &process).as_deref(), Some("1:2:10.0.0.1:gse:proc-test"));
        assert_eq!(v1_namespace(&host, "gse").as_deref(), Some("1:2:10.0.0.1:gse"));
        assert_eq!(v2(&host.key, &process), "1:10.0.0.1:gse:proc-test");
        assert_eq!(v2(&address("@0:10.0.0.1"), &process), "0:10.0.0.1:gse:proc-test");
        assert_eq!(v2(&address("0:fe80::1"), &process), "0:fe80::1:gse:proc-test");
        let mut spec = Spec::default();
        spec.identity.setup_path = "/usr/local/gse/".into();
        spec.identity.proc_name = "proc-test".into();
        assert_eq!(job(&host.key, &spec), "/usr/local/gse/proc-test:1:10.0.0.1");
        let agent = Host { key: address("@020a"), supplier: None, agent_id: None };
        assert_eq!(v1(&agent, &process), None);
    }
}
