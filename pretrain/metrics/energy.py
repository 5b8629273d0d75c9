"""From GPU hours to kilowatt hours and carbon: two products, with the conventions that go with them.

Power is the board's, at a stated wattage for all hours: no CPUs, network or cooling. Never loads torch.
"""

# Llama 3's published 390 t CO2e for 1.3 M hours at 700 W is 0.43 kg per kWh, near the world's average mix.
DEFAULT_GRID_KG_PER_KWH = 0.43


def gpu_hours(flops: float, *, mfu: float, peak_flops: float) -> float:
    """Hours of one device for `flops` model FLOPs at a share `mfu` of `peak_flops` (FLOP/s)."""
    return flops / (mfu * peak_flops) / 3600


def energy_kwh(hours: float, *, watts: float) -> float:
    return hours * watts / 1000


def co2e_kg(kwh: float, *, grid_kg_per_kwh: float) -> float:
    return kwh * grid_kg_per_kwh
