//! `burn-megatron schedule`.

use std::process::ExitCode;

use burn_megatron::partial::replace_file;
use burn_megatron::pipeline::schedule::{ScheduleKind, Times, simulate, validate};

use crate::cli::ScheduleArgs;
use crate::recipe::{Error, read_schedule};

/// Prints the table, the bubble and the memory; writes the chart and the CSV.
pub fn run(args: &ScheduleArgs) -> Result<ExitCode, Error> {
    let virtual_stages = match args.kind.parse::<ScheduleKind>() {
        Ok(kind) => args.virtual_stages.unwrap_or(kind.usual_virtual_stages()),
        Err(_) => args.virtual_stages.unwrap_or(1),
    };
    if virtual_stages == 0 || !args.stages.is_multiple_of(virtual_stages) {
        return Err(format!(
            "{} stages cannot be shared by ranks with {virtual_stages} each; a multiple of \
             {virtual_stages} can",
            args.stages,
        )
        .into());
    }
    let ranks = args.stages / virtual_stages;
    let given = args.virtual_stages;
    let schedule = read_schedule(&args.kind, ranks, given, args.micro_batches)?;
    let &[forward, input, weight, transfer] = &args.times[..] else {
        let count = args.times.len();
        return Err(format!("--times takes four numbers, as in 1,1,1,0, not {count}").into());
    };
    validate(&schedule)?;
    let times = Times::uniform(schedule.stages(), forward, input, weight, transfer);
    let simulation = simulate(&schedule, &times)?;
    print!("{}", simulation.table(args.columns));
    simulation.write_svg(&args.svg)?;
    println!("chart written to {}", args.svg.display());
    if let Some(path) = &args.csv {
        replace_file(path, schedule.to_csv().as_bytes())
            .map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        println!("schedule written to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}
