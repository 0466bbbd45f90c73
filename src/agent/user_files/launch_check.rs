//! Checks of a launch's files that change nothing: by the code of a launch, and with the same rights.

use std::io;
use std::path::PathBuf;

use super::pid_file::is_replaceable;
use super::walk::{FileAccess, FileError, parent};
use super::{FileWork, Rights, UserFileError, open_log};

impl Rights {
    /// Reason why a launch could not append to an existing log. A missing file is accepted: a launch creates it.
    pub async fn check_log(&self, path: &str, name: &str) -> Result<(), UserFileError> {
        let (path, name) = (PathBuf::from(path), name.to_owned());
        self.run(FileWork::Launch, "open log_path", move |rights| {
            let opened = rights.with(&path, move |path, rule| {
                open_log(path, &name, rule, FileAccess::AppendExisting).map(drop)
            });
            unless_missing(opened).map_err(|error| rights.explain_log(&path, error))
        })
        .await
    }

    /// Reason why a launch could not replace an existing pid file.
    pub async fn check_pid_file(&self, path: &str) -> Result<(), UserFileError> {
        let path = PathBuf::from(path);
        self.run(FileWork::PidFile, "read pid_path", move |rights| {
            let checked = rights.with(&path, |path, rule| {
                let (folder, name) = parent(path, rule, false)?;
                folder.kind(&name)?.map_or(Ok(()), |stat| is_replaceable(&folder, &name, &stat))
            });
            unless_missing(checked).map_err(|error| rights.explain_pid_file(&path, error))
        })
        .await
    }
}

fn unless_missing(result: Result<(), FileError>) -> Result<(), FileError> {
    match result {
        Err(FileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
