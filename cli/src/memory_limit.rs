//! Checks the planned memory of a run against the available memory before anything is allocated.

use std::fmt;
use std::path::Path;

use burn_megatron::data_parallel::host_memory::{HostMemory, MemoryLimit};
use burn_megatron::data_parallel::{ZeroStage, format_bytes};
use burn_megatron::device::DeviceKind;
use burn_megatron::kernels::record::ShapeSettings;
use burn_megatron::mesh::Mesh;
use burn_megatron::text_table::Table;
use burn_megatron_plan::Recompute;
use burn_megatron_plan::memory::{MemoryByKind, MemoryReport, MemoryRequest, RankProfiles};

use crate::byte_size::ByteSize;
use crate::error::Error;
use crate::parallel_plan::ParallelPlan;
use crate::ranks::RankSetup;
use crate::recipe::Recipe;
use crate::terminal;

/// Plans the memory of a run.
///
/// # Errors
///
/// Returns an error for an invalid recipe, or for a model with an operation that cannot be planned.
pub fn plan(recipe: &Recipe) -> Result<MemoryReport, Error> {
    plan_layout(recipe, recipe.plan()?, &RankProfiles::default())
}

/// Runs [`plan`] for a recipe whose [settings](Recipe::plan) were checked, with the profiles of earlier plans of the
/// same recipe in other layouts.
///
/// # Errors
///
/// Returns an error for a model with an operation that cannot be planned.
pub fn plan_layout(
    recipe: &Recipe,
    mut plan: ParallelPlan,
    profiles: &RankProfiles,
) -> Result<MemoryReport, Error> {
    let train = &recipe.train;
    let share = train.global_batch_size / plan.layout.data_size();
    let mut sequence_length = recipe.sequence_length();
    let mut micro_batch_size = train.micro_batch_size;
    if let Some(tokens) = plan.layout.hybrid_tokens() {
        // The plan assumes a full micro-batch of documents on one rank. No document is longer than a row.
        sequence_length = sequence_length.min(tokens);
        micro_batch_size = tokens.div_ceil(sequence_length.max(1));
        plan.layout = plan.layout.with_whole_sequences();
    }
    let request = MemoryRequest {
        layout: &plan.layout,
        ranks: plan.mesh.world_size(),
        micro_batch_size,
        sequence_length,
        micro_batches: (share / train.micro_batch_size).max(1),
        sharding: &recipe.sharing(),
        kernels: &recipe.kernels,
        fp8: &recipe.fp8,
        lora: recipe.lora.as_ref(),
        recompute: &recipe.memory.recompute(),
        settings: ShapeSettings::default(),
        slack: 1.0,
    };
    recipe.model.plan_memory(&request, profiles)
}

/// The fraction of a device's memory above which a plan is tight.
const TIGHT: f64 = 0.6;

/// Maximum number of pipeline ranks in a table.
const MOST_COLUMNS: usize = 4;

/// Planned memory of a run.
pub struct PlannedMemory {
    /// The report per pipeline rank, or the reason why memory cannot be planned.
    report: Result<MemoryReport, String>,
    /// The bytes that the rank with the highest memory use would need if each rank held whole sequences. Set for a
    /// layout that splits sequences.
    whole_sequences: Option<u64>,
}

/// Ranks whose memory is compared with a limit.
#[derive(Clone, Copy)]
enum Ranks {
    /// The rank that needs the most memory.
    Fullest,
    /// The rank with this number.
    Rank(usize),
    /// All ranks on this machine, given by their number. With several processes it is unknown which ranks these are:
    /// the ranks that need the least memory are assumed.
    Here(usize),
}

/// A memory limit.
struct Limit {
    ranks: Ranks,
    bytes: u64,
    /// The words before the bytes, as in `this machine has`.
    of: String,
    /// Whether it is a limit of the host, whose memory also holds offloaded state.
    is_host: bool,
}

impl PlannedMemory {
    /// Plans the memory of a run. A model with an operation that cannot be planned is not an error.
    pub fn new(recipe: &Recipe) -> Self {
        let parallel = &recipe.parallel;
        let shares = parallel.context > 1 && parallel.hybrid_tokens().is_none();
        let whole_sequences = shares.then(|| {
            let mut whole = recipe.clone();
            whole.parallel.context = 1;
            whole.parallel.context_exchange = None;
            whole.parallel.context_inner = None;
            plan(&whole)
        });
        let whole_sequences = whole_sequences.and_then(Result::ok);
        Self {
            report: plan(recipe).map_err(|error| error.to_string()),
            whole_sequences: whole_sequences.map(|report| report.fullest().1.peak.total()),
        }
    }

    /// Checks that the ranks of a run fit into memory. If a limit is `given`, each rank must stay within it.
    /// Otherwise the ranks must fit into the memory of this machine, of the cgroup of this process, or of its
    /// devices. Unknown sizes are not checked, and the user can skip the check.
    ///
    /// # Errors
    ///
    /// Returns an error with the required memory by kind, and the changes of the recipe that would fit. For a given
    /// limit, also returns an error if memory cannot be planned, with the reason.
    pub fn check(
        &self,
        recipe: &Recipe,
        given: Option<ByteSize>,
        ranks: &RankSetup,
        device: DeviceKind,
    ) -> Result<(), Error> {
        let limits = match given {
            Some(ByteSize(bytes)) => vec![Limit {
                ranks: Ranks::Fullest,
                bytes,
                of: "--memory-limit is".into(),
                is_host: false,
            }],
            None => limits(ranks, device),
        };
        let report = match (&self.report, given) {
            (Ok(report), _) => report,
            (Err(error), Some(_)) => return Err(error.clone().into()),
            (Err(_), None) => return Ok(()),
        };
        let hint = match given {
            Some(_) => "",
            None => "; --ignore-memory skips this check",
        };
        for limit in limits {
            limit
                .check(recipe, report)
                .map_err(|error| format!("{error}{hint}"))?;
        }
        Ok(())
    }

    /// Returns whether the rank with the highest memory use needs most of a device with this memory. The pools of the
    /// device may then leave too little memory for other libraries.
    pub fn is_tight(&self, device_bytes: u64) -> bool {
        let report = self.report.as_ref();
        let needed = report.map_or(0, |report| report.fullest().1.peak.total());
        needed as f64 > TIGHT * device_bytes as f64
    }

    /// Returns a table of the peak memory of each pipeline rank by kind, or an empty string without a plan. With many
    /// ranks, the table contains only the rank with the highest memory use.
    pub fn table(&self) -> String {
        let Ok(report) = &self.report else {
            return String::new();
        };
        let ranks = report.ranks.iter().map(|rank| rank.peak).enumerate();
        let ranks: Vec<_> = if report.ranks.len() <= MOST_COLUMNS {
            ranks.collect()
        } else {
            vec![(report.fullest().0, report.fullest().1.peak)]
        };
        let row = |name: &str, cells: Vec<String>| [vec![name.to_string()], cells].concat();
        let titles = ranks.iter().map(|(rank, _)| format!("rank {rank}"));
        let mut rows = vec![row("pipeline", titles.collect())];
        for (number, (kind, _)) in MemoryByKind::default().kinds().into_iter().enumerate() {
            let bytes = ranks.iter().map(|(_, peak)| peak.kinds()[number].1);
            if bytes.clone().any(|bytes| bytes > 0) {
                rows.push(row(kind, bytes.map(format_bytes).collect()));
            }
        }
        let totals = ranks.iter().map(|(_, peak)| format_bytes(peak.total()));
        rows.push(row("total", totals.collect()));
        Table::new(rows).fit(terminal::width())
    }

    /// Plots the memory over a step, if it is planned.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<(), Error> {
        match &self.report {
            Ok(report) => Ok(report.write_svg(path, "Planned memory of a step", None)?),
            Err(_) => Ok(()),
        }
    }
}

impl fmt::Display for PlannedMemory {
    /// Writes the peak of the rank with the highest memory use and its kinds as one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = match &self.report {
            Ok(report) => report,
            Err(error) => return write!(f, "not planned: {error}"),
        };
        let (rank, memory) = report.fullest();
        let (total, kinds) = (format_bytes(memory.peak.total()), kinds(&memory.peak));
        write!(f, "{total} at the peak of a rank ({kinds})")?;
        if report.ranks.len() > 1 {
            write!(f, ", of pipeline rank {rank}")?;
        }
        match self.whole_sequences {
            Some(bytes) => write!(f, "; {} with whole sequences", format_bytes(bytes)),
            None => Ok(()),
        }
    }
}

/// Returns the memory limits of this machine, of the cgroup of this process and of its devices, as far as they are
/// known.
fn limits(setup: &RankSetup, device: DeviceKind) -> Vec<Limit> {
    let here = Ranks::Here(setup.on_this_machine);
    // Each process may have its own cgroup.
    let own = setup.own_rank.map_or(here, Ranks::Rank);
    match device {
        DeviceKind::Cpu => {
            let memory = HostMemory::read();
            let limits = [(own, memory.cgroup), (here, memory.machine)].into_iter();
            let limits = limits.filter_map(|(ranks, limit)| limit.map(|limit| (ranks, limit)));
            let limits = limits.map(|(ranks, MemoryLimit { bytes, of })| Limit {
                ranks,
                bytes,
                of: format!("{of} has"),
                is_host: true,
            });
            limits.collect()
        }
        DeviceKind::Wgpu | DeviceKind::Cuda => {
            let Some(bytes) = device.memory() else {
                return vec![];
            };
            let devices = device.devices().map_or(1, |devices| devices.len());
            let sharing = setup.on_this_machine.div_ceil(devices);
            let (ranks, of) = match sharing {
                1 => (own_or_fullest(setup), "its device has"),
                _ => (Ranks::Here(sharing), "the device that they share has"),
            };
            vec![Limit {
                ranks,
                bytes,
                of: of.into(),
                is_host: false,
            }]
        }
    }
}

fn own_or_fullest(setup: &RankSetup) -> Ranks {
    setup.own_rank.map_or(Ranks::Fullest, Ranks::Rank)
}

impl Ranks {
    /// Returns the maximum memory that these ranks need together.
    fn need(self, report: &MemoryReport, mesh: &Mesh, is_host: bool) -> MemoryByKind {
        let of = |rank: usize| {
            let pipeline = mesh.coordinates(rank).pipeline;
            let rank = &report.ranks[pipeline];
            if !is_host {
                return rank.peak;
            }
            MemoryByKind {
                optimizer: rank.peak.optimizer + report.states[pipeline].host_optimizer,
                activations: rank.peak.activations + rank.host_activations,
                ..rank.peak
            }
        };
        match self {
            Self::Fullest => report.fullest().1.peak,
            Self::Rank(rank) => of(rank),
            Self::Here(count) => {
                let mut all: Vec<_> = (0..mesh.world_size()).map(of).collect();
                all.sort_by_key(MemoryByKind::total);
                all.into_iter().take(count).sum()
            }
        }
    }

    /// Returns the start of a sentence about these ranks.
    fn describe(self, report: &MemoryReport) -> String {
        match self {
            Self::Fullest => format!("a rank of pipeline rank {} needs", report.fullest().0),
            Self::Rank(rank) => format!("rank {rank} needs"),
            Self::Here(1) => "a rank needs".into(),
            Self::Here(count) => format!("{count} ranks need"),
        }
    }
}

impl Limit {
    fn fits(&self, recipe: &Recipe, report: &MemoryReport) -> Result<MemoryByKind, MemoryByKind> {
        let need = match recipe.plan() {
            Ok(plan) => self.ranks.need(report, &plan.mesh, self.is_host),
            Err(_) => report.fullest().1.peak,
        };
        if need.total() <= self.bytes {
            Ok(need)
        } else {
            Err(need)
        }
    }

    fn check(&self, recipe: &Recipe, report: &MemoryReport) -> Result<(), Error> {
        let Err(need) = self.fits(recipe, report) else {
            return Ok(());
        };
        let fits = changes(recipe).into_iter().filter(|(_, changed)| {
            plan(changed).is_ok_and(|report| self.fits(changed, &report).is_ok())
        });
        let fits: Vec<_> = fits.map(|(name, _)| name).collect();
        let advice = if fits.is_empty() {
            "no single change of micro_batch_size, offload, zero_stage, tensor, context or pipeline fits"
                .into()
        } else {
            format!("possible changes: {}", fits.join(", "))
        };
        Err(format!(
            "{} {} ({}), and {} {}: {advice}",
            self.ranks.describe(report),
            format_bytes(need.total()),
            kinds(&need),
            self.of,
            format_bytes(self.bytes),
        )
        .into())
    }
}

/// Lists the kinds of memory that are not empty.
fn kinds(memory: &MemoryByKind) -> String {
    let kinds = memory.kinds().into_iter().filter(|(_, bytes)| *bytes > 0);
    let kinds = kinds.map(|(kind, bytes)| format!("{} {kind}", format_bytes(bytes)));
    kinds.collect::<Vec<_>>().join(", ")
}

/// Returns variants of the recipe with one change each, on the same number of ranks. Invalid variants have no plan.
fn changes(recipe: &Recipe) -> Vec<(String, Recipe)> {
    let mut changes = vec![];
    let mut add = |name: String, change: &dyn Fn(&mut Recipe)| {
        let mut changed = recipe.clone();
        change(&mut changed);
        changes.push((name, changed));
    };
    if recipe.train.micro_batch_size > 1 {
        add("micro_batch_size = 1".into(), &|it| {
            it.train.micro_batch_size = 1
        });
    }
    if !recipe.memory.recompute.is_on() {
        for kind in [Recompute::Selective, Recompute::Full] {
            let name = format!("memory.recompute.granularity = {:?}", kind.name());
            add(name, &|it| it.memory.recompute = kind.settings());
        }
    }
    if recipe.memory.offload.optimizer < 1.0 {
        add("memory.offload.optimizer = 1".into(), &|it| {
            it.memory.offload.optimizer = 1.0
        });
    }
    let stages = [
        ZeroStage::Optimizer,
        ZeroStage::Gradients,
        ZeroStage::Parameters,
    ];
    for stage in stages
        .into_iter()
        .filter(|it| *it > recipe.data_parallel.zero_stage)
    {
        add(format!("zero_stage = {stage}"), &|it| {
            it.data_parallel.zero_stage = stage
        });
    }
    let data = recipe.parallel.data_size();
    if data.is_multiple_of(2) {
        let halved = format!("with data = {}", data / 2);
        let layout = &recipe.parallel;
        add(format!("tensor = {} {halved}", 2 * layout.tensor), &|it| {
            it.parallel.data = Some(data / 2);
            it.parallel.tensor *= 2;
        });
        add(
            format!("context = {} {halved}", 2 * layout.context),
            &|it| {
                it.parallel.data = Some(data / 2);
                it.parallel.context *= 2;
            },
        );
        add(
            format!("pipeline = {} {halved}", 2 * layout.pipeline),
            &|it| {
                it.parallel.data = Some(data / 2);
                it.parallel.pipeline *= 2;
            },
        );
    }
    changes
}

#[cfg(test)]
#[path = "memory_limit_tests.rs"]
mod tests;
