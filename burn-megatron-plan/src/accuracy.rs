//! Compares the step times that the planner estimated with measured step times.

use plotters::prelude::*;

use burn_megatron_plot::{FAINT, FONT, PlotError, TEXT, failed, render};

const SIZE: (u32, u32) = (900, 640);
const DOT: RGBColor = RGBColor(0, 114, 178);

/// A layout with its planned and its measured step time.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedPlan {
    /// The name of the layout.
    pub name: String,
    /// The planned time of a step, in seconds.
    pub planned: f64,
    /// The measured time of a step, in seconds.
    pub measured: f64,
}

/// Returns Spearman's rank correlation coefficient of the planned and the measured times. It is between -1 and 1, and 1
/// means that the planned and the measured times have the same order. Equal times get the mean of their ranks. Returns
/// `None` for fewer than two plans, or if all planned or all measured times are equal.
///
/// ```
/// use burn_megatron_plan::accuracy::{TimedPlan, spearman};
///
/// let plan = |planned, measured| TimedPlan { name: "tp2".into(), planned, measured };
/// // The planned times have the order of the measured times.
/// assert_eq!(spearman(&[plan(1.0, 1.5), plan(2.0, 2.1), plan(3.0, 9.0)]), Some(1.0));
/// ```
pub fn spearman(plans: &[TimedPlan]) -> Option<f64> {
    let ranks = |of: fn(&TimedPlan) -> f64| ranks(&plans.iter().map(of).collect::<Vec<_>>());
    let (planned, measured) = (ranks(|it| it.planned), ranks(|it| it.measured));
    let mean = (plans.len() as f64 + 1.0) / 2.0;
    let product = |one: &[f64], other: &[f64]| {
        let pairs = one.iter().zip(other);
        pairs.map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>()
    };
    let scale = (product(&planned, &planned) * product(&measured, &measured)).sqrt();
    (scale > 0.0).then(|| product(&planned, &measured) / scale)
}

/// Returns the rank of each value, from 1. Equal values get the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| *other < value).count();
        let equal = values.iter().filter(|other| *other == value).count();
        below as f64 + (equal as f64 + 1.0) / 2.0
    };
    values.iter().map(rank).collect()
}

/// Draws a scatter plot of the planned and the measured times as SVG. Each plan is a numbered dot. A line shows where
/// both times are equal.
///
/// # Errors
///
/// [`PlotError::Draw`] if drawing fails.
pub fn svg(title: &str, plans: &[TimedPlan]) -> Result<String, PlotError> {
    let all = plans.iter().flat_map(|plan| [plan.planned, plan.measured]);
    let most = all.fold(0.0, f64::max) * 1.1;
    let end = if most > 0.0 { most } else { 1.0 };
    let color = |size: i32| (FONT, size).into_font().color(&TEXT);
    render(SIZE, |area| {
        area.fill(&WHITE).map_err(failed)?;
        let (area, list) = area.split_horizontally(580);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, color(18))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..end, 0.0..end)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(FAINT)
            .axis_style(TEXT)
            .label_style(color(14))
            .axis_desc_style(color(16))
            .x_desc("planned seconds of a step")
            .y_desc("measured seconds of a step")
            .draw()
            .map_err(failed)?;
        let diagonal = [(0.0, 0.0), (end, end)];
        chart
            .draw_series(LineSeries::new(diagonal, TEXT.stroke_width(1)))
            .map_err(failed)?;
        let dot = |plan: &TimedPlan| Circle::new((plan.planned, plan.measured), 4, DOT.filled());
        chart.draw_series(plans.iter().map(dot)).map_err(failed)?;
        let number = |(number, plan): (usize, &TimedPlan)| {
            let at = (plan.planned + 0.012 * end, plan.measured + 0.012 * end);
            Text::new((number + 1).to_string(), at, color(13))
        };
        chart
            .draw_series(plans.iter().enumerate().map(number))
            .map_err(failed)?;
        for (number, plan) in plans.iter().enumerate() {
            let text = format!("{} {}", number + 1, plan.name);
            let at = (0, 60 + 20 * number as i32);
            list.draw(&Text::new(text, at, color(13))).map_err(failed)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans(times: &[(f64, f64)]) -> Vec<TimedPlan> {
        let plan = |(planned, measured): &(f64, f64)| TimedPlan {
            name: format!("{planned}"),
            planned: *planned,
            measured: *measured,
        };
        times.iter().map(plan).collect()
    }

    #[test]
    fn the_correlation_is_of_ranks() {
        let of = |times: &[(f64, f64)]| spearman(&plans(times));
        assert_eq!(of(&[(1.0, 10.0), (2.0, 11.0), (3.0, 500.0)]), Some(1.0));
        assert_eq!(of(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]), Some(-1.0));
        // 1 - 6 * 2 / (4 * 15)
        let one_swap = of(&[(1.0, 2.0), (2.0, 1.0), (3.0, 3.0), (4.0, 4.0)]).unwrap();
        assert!((one_swap - 0.8).abs() < 1e-12);
        // Ranks 1, 2.5, 2.5 against 1, 2, 3: scipy.stats.spearmanr.
        let tie = of(&[(1.0, 1.0), (2.0, 2.0), (2.0, 3.0)]).unwrap();
        assert!((tie - 0.866_025_403_784_438_6).abs() < 1e-12);
        assert_eq!(of(&[(1.0, 1.0)]), None);
        assert_eq!(of(&[(1.0, 1.0), (1.0, 2.0)]), None);
    }

    #[test]
    fn every_plan_is_drawn() {
        let svg = svg("Plans", &plans(&[(0.5, 0.7), (1.5, 1.25)])).unwrap();
        assert_eq!(svg.matches("<circle").count(), 2);
        for text in ["Plans", "1 0.5", "2 1.5", "planned seconds of a step"] {
            assert!(svg.contains(text), "{text}");
        }
    }
}
