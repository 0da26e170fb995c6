//! Tests of two ranks that save to disks which fail, hang, or wait until the weights have changed.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::sleep;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};

use super::*;
use burn_megatron::checkpoint::{Disk, DiskOperation, LoadTolerance, load_weights};
use burn_megatron::comm::World;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ParallelModule;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_test_support::TIMEOUT;
use burn_megatron_test_support::TestFolder;

type RankError = Box<dyn std::error::Error + Send + Sync>;

/// A rank with a state to save.
struct Ready {
    saver: Saver,
    ddp: DistributedDataParallel<Linear>,
    optimizer: ParallelAdamW,
    step: u64,
}

impl Ready {
    fn new(saving: &SaveConfig, groups: &ParallelContext, disk: Disk) -> Result<Self, RankError> {
        let mut saver = Saver::open(saving.clone(), groups)?;
        saver.folder = CheckpointFolder::create_on(disk, &saving.folder)?;
        // The lock is held by the folder that acquired it.
        saver._lock = None;
        groups.world().barrier()?;
        let model = LinearConfig::new(8, 6).init(&Device::flex());
        let ddp = DistributedDataParallel::new(ParallelModule::replicated(model), groups)?;
        Ok(Self {
            saver,
            optimizer: ParallelAdamW::new(&AdamWConfig::default(), &ddp)?,
            ddp,
            step: 0,
        })
    }

    fn save(&mut self) -> Result<Vec<SavedCheckpoint>, StateError> {
        self.step += 1;
        let content = CheckpointContent {
            snapshot: Snapshot::new(&self.ddp, &self.optimizer)?,
            objects: vec![],
            about: CheckpointMetadata {
                step: self.step,
                samples: 0,
                layout: "two ranks".into(),
                config: serde_json::Value::Null,
                state: serde_json::Value::Null,
            },
        };
        self.saver.save(Ok(content))
    }

    /// Sets every weight.
    fn fill(&mut self, value: f64) {
        self.ddp.update(|module| module.map(&mut Fill(value)));
    }
}

struct Fill(f64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.full_like(self.0))
    }
}

fn saving(folder: &TestFolder, asynchronous: bool) -> SaveConfig {
    SaveConfig {
        asynchronous,
        deadline: Duration::from_secs(20),
        ..SaveConfig::into_folder(folder.path().join("checkpoints"))
    }
}

fn two<T: Send>(run: impl Fn(&ParallelContext) -> Result<T, RankError> + Sync) -> Vec<T> {
    let mesh = ParallelConfig::new().with_data(2);
    let world = World::threads(2).unwrap();
    world
        .run(|rank| run(&ParallelContext::new(&mesh, &rank)?))
        .unwrap()
}

/// Returns a disk with a hook that runs before each write to a part.
fn on_write(hook: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Disk {
    let hook = move |operation, path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if operation == DiskOperation::Write && name.contains(".safetensors") {
            hook()
        } else {
            Ok(())
        }
    };
    Disk::hooked(hook, usize::MAX)
}

/// Returns a disk whose `number`-th write to a part fails.
fn full(number: usize) -> Disk {
    let writes = AtomicUsize::new(0);
    on_write(move || {
        if writes.fetch_add(1, Ordering::SeqCst) == number {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        } else {
            Ok(())
        }
    })
}

fn latest(saving: &SaveConfig) -> Option<u64> {
    let folder = CheckpointFolder::open(&saving.folder).unwrap();
    folder.latest().unwrap().map(|found| found.metadata().step)
}

/// If the disk of one rank is full once, no rank saves, all return the error, and the next save works.
#[test]
fn a_full_disk_of_one_rank_fails_all() {
    for full_rank in [0, 1] {
        let folder = TestFolder::new();
        let saving = saving(&folder, false);
        let errors = two(|groups| {
            let disk = if groups.rank() == full_rank {
                full(0)
            } else {
                Disk::default()
            };
            let mut ready = Ready::new(&saving, groups, disk)?;
            let error = ready.save().unwrap_err().to_string();
            groups.world().barrier()?;
            assert_eq!(latest(&saving), None);
            groups.world().barrier()?;
            let saved = ready.save()?;
            assert_eq!(saved.len(), usize::from(groups.rank() == 0));
            Ok(error)
        });
        for error in errors {
            assert!(
                error.contains("storage full") || error.contains("no storage space"),
                "{error}"
            );
        }
        assert_eq!(latest(&saving), Some(2));
    }
}

/// An error of a background save is returned by the next save, or at the end of the run.
#[test]
fn an_error_in_the_background_reaches_every_rank() {
    for full_rank in [0, 1] {
        for at_the_end in [false, true] {
            let folder = TestFolder::new();
            let saving = saving(&folder, true);
            let errors = two(|groups| {
                let disk = if groups.rank() == full_rank {
                    full(0)
                } else {
                    Disk::default()
                };
                let mut ready = Ready::new(&saving, groups, disk)?;
                assert_eq!(ready.save()?, []);
                let later = if at_the_end {
                    ready.saver.wait().map(|_| ())
                } else {
                    ready.save().map(|_| ())
                };
                Ok(later.unwrap_err().to_string())
            });
            for error in errors {
                assert!(error.contains("storage"), "{error}");
            }
            assert_eq!(latest(&saving), None);
        }
    }
}

/// A rank that never finishes does not block rank 0 forever.
#[test]
fn a_part_that_is_late_has_a_deadline() {
    let folder = TestFolder::new();
    let saving = SaveConfig {
        deadline: Duration::from_millis(200),
        ..saving(&folder, true)
    };
    let begun = Instant::now();
    let over = Arc::new(AtomicBool::new(false));
    let errors = two(|groups| {
        let disk = {
            let (over, slow) = (over.clone(), groups.rank() == 1);
            on_write(move || {
                while slow && !over.load(Ordering::SeqCst) {
                    sleep(Duration::from_millis(5));
                }
                Ok(())
            })
        };
        let mut ready = Ready::new(&saving, groups, disk)?;
        ready.save()?;
        if groups.rank() == 0 {
            while !matches!(ready.saver.pending, PendingSave::Finished(_)) {
                assert_eq!(ready.saver.take_finished(), None);
                assert!(begun.elapsed() < TIMEOUT, "it waits for ever");
                sleep(Duration::from_millis(5));
            }
            over.store(true, Ordering::SeqCst);
        }
        Ok(ready.saver.wait().unwrap_err().to_string())
    });
    assert!(
        errors[0].contains("no part of the checkpoint from rank 1"),
        "{}",
        errors[0]
    );
    assert_eq!(latest(&saving), None);
}

/// The weights change before a byte is written: the checkpoint must contain the earlier weights.
#[test]
fn the_background_saves_the_weights_of_its_start() {
    let folder = TestFolder::new();
    let saving = saving(&folder, true);
    let saved = two(|groups| {
        let changed = Arc::new(Barrier::new(2));
        let waits = AtomicBool::new(true);
        let disk = {
            let changed = changed.clone();
            on_write(move || {
                if waits.swap(false, Ordering::SeqCst) {
                    changed.wait();
                }
                Ok(())
            })
        };
        let mut ready = Ready::new(&saving, groups, disk)?;
        let weights = |ready: &Ready| -> Vec<_> {
            let parameters = ready.ddp.parameters().into_iter();
            parameters.map(Tensor::into_data).collect()
        };
        let before = weights(&ready);
        ready.save()?;
        assert_eq!(ready.saver.take_finished(), None);
        ready.fill(2.5);
        assert_ne!(weights(&ready), before);
        changed.wait();
        let mut finished = None;
        while groups.rank() == 0 && finished.is_none() {
            finished = ready.saver.take_finished();
            sleep(Duration::from_millis(1));
        }
        assert_eq!(ready.saver.wait()?, None);
        assert!(
            finished
                .iter()
                .all(|saved| saved.stall_seconds <= saved.seconds)
        );
        let checkpoint = Checkpoint::open(&saving.folder)?;
        load_weights(&mut ready.ddp, &checkpoint, LoadTolerance::default())?;
        assert_eq!(weights(&ready), before);
        Ok(finished.map(|saved| saved.step))
    });
    assert_eq!(saved, [Some(1), None]);
}
