"""What holds for every policy and forecast, as functions to call on one of your own."""

from hotset.testing.forecast_contract import check_forecast
from hotset.testing.policy_contract import check_policy
from hotset.testing.require import ContractError

__all__ = ["ContractError", "check_forecast", "check_policy"]
