//! Validation of JOB bodies, per call: the first error.

use super::{Api, JobBody, JobProcess, Limit};
use crate::gse::codes::GseOp;
use crate::gse::request::RequestError;
use crate::model::{AutoType, Percent};

impl JobBody {
    /// Checks the fields that all processes of a body share.
    pub fn check_head(&self) -> Result<(), RequestError> {
        let scope = self.bk_scope_type.as_deref().is_some_and(|scope| matches!(scope, "biz" | "biz_set"));
        if self.bk_biz_id.is_none() && (self.bk_scope_id.is_none() || !scope) {
            return Err(RequestError::new(
                "bk_biz_id",
                "is missing, and there is no scope of type biz or biz_set",
            ));
        }
        Ok(())
    }

    /// Checks a body against the requirements of its call's document.
    pub fn check(&self, api: Api) -> Result<(), RequestError> {
        self.check_head()?;
        if self.process_infos.is_empty() {
            return Err(RequestError::missing("process_infos"));
        }
        for (at, process) in self.process_infos.iter().enumerate() {
            process.check(api, self.op_type).map_err(|wrong| {
                RequestError::new(format!("process_infos[{at}].{}", wrong.field), wrong.why)
            })?;
        }
        Ok(())
    }
}

impl JobProcess {
    /// Whether a live check means the process by its name: the path is not set.
    pub fn is_looked_up(&self, api: Api, op_type: Option<i64>) -> bool {
        let status = api == Api::OperateProcess && op_type == Some(GseOp::Status.code());
        status && self.setup_path.as_ref().is_none_or(String::is_empty)
    }

    pub fn check(&self, api: Api, op_type: Option<i64>) -> Result<(), RequestError> {
        let required: &[(&str, &Option<String>)] = match api {
            Api::OperateProcess if self.is_looked_up(api, op_type) => &[("proc_name", &self.proc_name)],
            Api::ManageProc => &[("proc_name", &self.proc_name), ("proc_owner", &self.proc_owner)],
            Api::OperateProcess => &[
                ("proc_name", &self.proc_name),
                ("setup_path", &self.setup_path),
                ("pid_path", &self.pid_path),
            ],
        };
        for (field, value) in required {
            if value.as_ref().is_none_or(String::is_empty) {
                return Err(RequestError::missing(field));
            }
        }
        if self.ip_list.is_empty() {
            return Err(RequestError::missing("ip_list"));
        }
        for (at, host) in self.ip_list.iter().enumerate() {
            if host.ip.parse::<std::net::IpAddr>().is_err() {
                return Err(RequestError::new(format!("ip_list[{at}].ip"), "is not an IP address"));
            }
        }
        match self.r#type {
            Some(0) | None if self.cycle_time.is_none() && runs_by_its_kind(api, op_type) => {
                return Err(RequestError::new("cycle_time", "is missing: type 0 requires it"));
            }
            Some(code) if AutoType::try_from(code).is_err() => {
                return Err(RequestError::new("type", "is not 0, 1 or 2"));
            }
            Some(_) | None => {}
        }
        for (field, share) in [("cpu_lmt", self.cpu_lmt), ("mem_lmt", self.mem_lmt)] {
            if share.is_some_and(|Limit(share)| Percent::new(share).is_none()) {
                return Err(RequestError::new(field, "is not a percentage between 0 and 100"));
            }
        }
        let numbers = [
            ("cycle_time", self.cycle_time),
            ("instance_num", self.instance_num),
            ("op_timeout", self.op_timeout),
            ("start_check_begin_time", self.start_check_begin_time),
            ("start_check_end_time", self.start_check_end_time),
        ];
        for (field, number) in numbers {
            if number.is_some_and(|number| u32::try_from(number).is_err()) {
                return Err(RequestError::new(field, "is out of range"));
            }
        }
        Ok(())
    }
}

/// Whether an operation depends on the type. An unset type is 0.
fn runs_by_its_kind(api: Api, op_type: Option<i64>) -> bool {
    match api {
        Api::ManageProc => op_type == Some(1),
        Api::OperateProcess => matches!(op_type, Some(0 | 3 | 7 | 8)),
    }
}
