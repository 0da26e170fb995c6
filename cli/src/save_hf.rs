//! Implements `--save-hf`, which writes a Hugging Face folder for each checkpoint of a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use burn_megatron::checkpoint::{Checkpoint, ElementType, TensorSource, check_place};
use burn_megatron::nn::lora::LoraLayers;
use burn_megatron_models::hf::peft::is_peft_folder;
use burn_megatron_models::hf::{ExportOptions, is_hf_folder};
use parking_lot::Mutex;

use crate::companions::Companions;
use crate::data;
use crate::error::Error;
use crate::family::Model;
use crate::recipe::Recipe;
use crate::replaced_folder::replace;
use crate::saving::SavingArgs;

/// The folder in the run folder that contains a folder for each checkpoint, with the same name.
const FOLDER: &str = "hugging-face";

/// The interval at which a writing thread is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Writes the folders in the background, on the rank that publishes the checkpoints.
pub struct HfSaver {
    target: Target,
    writing: Option<HfWrite>,
    /// The timeout of a collective.
    timeout: Duration,
}

/// Folder that is being written.
struct HfWrite {
    thread: JoinHandle<Result<(), String>>,
    /// The name of the checkpoint.
    name: PathBuf,
    /// The time at which the last bytes were written.
    last: Arc<Mutex<Instant>>,
}

/// Model to write, and its destination.
#[derive(Clone)]
struct Target {
    model: Model,
    /// The adapters, if the recipe has adapters. Then only the adapters are written, in the format of `peft`.
    lora: Option<LoraLayers>,
    folder: PathBuf,
    /// The files that are written next to the weights.
    companions: Arc<Companions>,
    dtype: Option<ElementType>,
}

/// Returns the files next to the weights for a run that starts.
///
/// # Errors
/// Returns an error if a file of the recipe cannot be read.
pub fn companions(recipe: &Recipe) -> Result<Companions, Error> {
    let tokenizer = match &recipe.data.tokenizer {
        Some(name) => Some(name.clone()),
        None => data::tokenizer(recipe)?.map(|tokenizer| tokenizer.name().into()),
    };
    let found = Companions::of_recipe(&serde_json::to_value(recipe)?, tokenizer.as_deref());
    found.map_err(|error| format!("--save-hf: {error}").into())
}

/// Checks that the checkpoints of a run can be written as Hugging Face folders.
///
/// # Errors
/// Returns an error for a model without a Hugging Face family, and for settings that could remove a checkpoint while
/// it is read.
pub fn check(recipe: &Recipe, saving: &SavingArgs) -> Result<(), Error> {
    if saving.save_hf.is_none() {
        return Ok(());
    }
    let config = &recipe.checkpoint;
    if !config.save {
        return Err(
            "--save-hf has no effect with checkpoint.save = false; remove one of them".into(),
        );
    }
    // One checkpoint is read while the next is saved. An asynchronous checkpoint is published before the next step.
    let least = if config.asynchronous { 3 } else { 2 };
    if config.keep_last.is_some_and(|last| last < least) {
        return Err(format!(
            "--save-hf reads a checkpoint while training goes on: set checkpoint.keep_last (--checkpoint.keep_last) to at least \
             {least}"
        )
        .into());
    }
    let family = recipe.model.family();
    let lora = recipe.lora.as_ref();
    let layers = lora.map(|lora| recipe.model.adapted_layers(lora));
    let layers = layers.transpose()?;
    match recipe.model.hf() {
        None => {
            Err(format!("--save-hf: the family {family:?} is not a Hugging Face family").into())
        }
        Some(exchange) => match &layers {
            Some(layers) => exchange.check_adapter((&recipe.model, layers)),
            None => {
                companions(recipe)?;
                exchange.check(&recipe.model)
            }
        },
    }
}

impl HfSaver {
    /// Creates the saver for a run in this folder. `timeout` is the timeout of the collectives. Returns `None`
    /// without `--save-hf`.
    pub fn new(
        run: &Path,
        recipe: &Recipe,
        saving: &SavingArgs,
        timeout: Duration,
    ) -> Result<Option<Self>, Error> {
        let Some(dtype) = saving.save_hf else {
            return Ok(None);
        };
        let (model, lora) = (&recipe.model, recipe.lora.as_ref());
        let lora = lora.map(|lora| model.adapted_layers(lora)).transpose()?;
        let folder = run.join(FOLDER);
        // The folder may be a link. Folders of steps in it are replaced, and removed with their checkpoints.
        check_place(&folder.join("step")).map_err(|error| format!("--save-hf: {error}"))?;
        let target = Target {
            model: model.clone(),
            lora,
            folder,
            companions: Arc::new(match recipe.lora {
                None => companions(recipe)?,
                // Adapters are written without the files of the base model.
                Some(_) => Companions::default(),
            }),
            dtype: dtype.map(ElementType::from),
        };
        Ok(Some(Self {
            target,
            writing: None,
            timeout,
        }))
    }

    /// Starts to write the folder of a published checkpoint, after the previous folder is complete.
    ///
    /// # Errors
    /// Returns an error if writing the previous folder failed, or if it takes too long: the other ranks wait for this
    /// rank in a collective.
    pub fn save(&mut self, checkpoint: &Path) -> Result<(), Error> {
        // Report the error before the other ranks time out.
        self.wait_for(self.timeout * 3 / 4)?;
        let (target, checkpoint) = (self.target.clone(), checkpoint.to_path_buf());
        let last = Arc::new(Mutex::new(Instant::now()));
        let (name, written) = (checkpoint.clone(), last.clone());
        let write = move || {
            let written = target.write(&checkpoint, &mut |_| *written.lock() = Instant::now());
            written.map_err(|error| error.to_string())
        };
        let thread = thread::Builder::new().name("save-hf".into());
        let thread = thread.spawn(write)?;
        self.writing = Some(HfWrite { thread, name, last });
        Ok(())
    }

    /// Waits until the current folder is written.
    ///
    /// # Errors
    /// Returns an error if a write failed, or if nothing was written for the duration of the timeout.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.wait_for(Duration::MAX)
    }

    /// Waits at most for this time; see [`wait`](Self::wait).
    fn wait_for(&mut self, most: Duration) -> Result<(), Error> {
        let Some(HfWrite { thread, name, last }) = self.writing.take() else {
            return Ok(());
        };
        let (started, timeout) = (Instant::now(), self.timeout.as_secs_f64());
        let of = format!(
            "the Hugging Face folder of {} in {}",
            name.file_name().unwrap_or_default().display(),
            self.target.folder.display()
        );
        while !thread.is_finished() {
            if last.lock().elapsed() > self.timeout {
                return Err(format!(
                    "--save-hf: nothing was written to {of} for {timeout} s (--timeout): is the disk mounted?"
                )
                .into());
            }
            if started.elapsed() > most {
                return Err(format!(
                    "--save-hf: {of} is not complete when the next one is due, and the other ranks wait for {timeout} \
                     s (--timeout): raise --timeout, or save less often (--save-every)"
                )
                .into());
            }
            thread::sleep(POLL_INTERVAL);
        }
        match thread.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("--save-hf: {error}").into()),
            Err(_) => Err("--save-hf: the thread that writes panicked".into()),
        }
    }
}

/// Completes the current folder even if the run fails.
impl Drop for HfSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            eprintln!("{error}");
        }
    }
}

impl Target {
    /// Writes a checkpoint. `progress` receives the number of bytes written since its last call.
    fn write(&self, path: &Path, progress: &mut dyn FnMut(u64)) -> Result<(), Error> {
        let checkpoint = Checkpoint::open(path)?;
        let name = checkpoint.path().file_name().unwrap_or_default().to_owned();
        let to = self.folder.join(&name);
        let options = ExportOptions {
            dtype: self.dtype,
            ..ExportOptions::default()
        };
        let family = self.model.family();
        let exchange = self
            .model
            .hf()
            .ok_or_else(|| format!("no family {family}"))?;
        // If the run was resumed from an earlier step, this step may have been saved before.
        replace(&to, |to| {
            match &self.lora {
                None => {
                    let weights = (&checkpoint, &checkpoint as &dyn TensorSource);
                    exchange.export(weights, &self.companions, to, options, progress)?;
                }
                Some(layers) => {
                    let model = (&self.model, layers);
                    exchange.export_adapter(&checkpoint, model, to, options, progress)?;
                }
            }
            Ok(())
        })?;
        self.remove_others(checkpoint.path())
    }

    /// Removes the folders whose checkpoints were removed.
    fn remove_others(&self, checkpoint: &Path) -> Result<(), Error> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let is_step = name.to_string_lossy().starts_with("step-");
            let is_exported = is_hf_folder(&entry.path()) || is_peft_folder(&entry.path());
            if is_step && is_exported && !checkpoint.with_file_name(&name).exists() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Folders of steps would be replaced there.
    #[cfg(unix)]
    #[test]
    fn a_link_to_checkpoints_is_no_place_for_folders() {
        let held = tempfile::tempdir().unwrap();
        let checkpoints = held.path().join("other/checkpoints");
        fs::create_dir_all(checkpoints.join("step-00000004")).unwrap();
        fs::write(checkpoints.join("latest"), "step-00000004\n").unwrap();
        let folder = held.path().join("run/hugging-face");
        fs::create_dir_all(&folder).unwrap();
        let saving = crate::flags::parse_text::<SavingArgs>("--save-hf").unwrap();
        let new = || {
            let run = held.path().join("run");
            HfSaver::new(&run, &Recipe::default(), &saving, Duration::from_secs(1))
        };
        assert!(new().unwrap().is_some());
        fs::remove_dir(&folder).unwrap();
        for to in [&checkpoints, &checkpoints.join("step-00000004")] {
            std::os::unix::fs::symlink(to, &folder).unwrap();
            let error = new().err().unwrap().to_string();
            let says = "is inside the folder of checkpoints";
            assert!(error.contains(says), "{error}");
            fs::remove_file(&folder).unwrap();
        }
    }

    #[test]
    fn a_write_that_stands_still_or_is_too_slow_is_an_error_that_names_it() {
        let waiting = |idle: Duration, most| {
            let (end, wait) = mpsc::channel::<()>();
            let last = Instant::now().checked_sub(idle).unwrap();
            let write = HfWrite {
                thread: thread::spawn(move || {
                    let _ = wait.recv();
                    Ok(())
                }),
                name: "checkpoints/step-00000004".into(),
                last: Arc::new(Mutex::new(last)),
            };
            let mut saver = HfSaver {
                target: Target {
                    model: Model::default(),
                    lora: None,
                    folder: "run/hugging-face".into(),
                    companions: Arc::default(),
                    dtype: None,
                },
                writing: Some(write),
                timeout: Duration::from_secs(100),
            };
            let waited = saver.wait_for(most);
            drop(end);
            waited.unwrap_err().to_string()
        };
        let of = "the Hugging Face folder of step-00000004 in run/hugging-face";
        let still = waiting(Duration::from_secs(101), Duration::MAX);
        let says = format!("--save-hf: nothing was written to {of} for 100 s (--timeout)");
        assert!(still.starts_with(&says), "{still}");
        let slow = waiting(Duration::ZERO, Duration::from_millis(30));
        let says = format!("--save-hf: {of} is not complete when the next one is due");
        assert!(slow.starts_with(&says), "{slow}");
    }
}
